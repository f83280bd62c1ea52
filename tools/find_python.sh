#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that runs and has venv; exits 1 with one line when there is none.
set -u

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
candidates=("${PYTHON:-}" python3.13 python3.12 python3)
while IFS= read -r found; do candidates+=("$found"); done \
    < <(ls -d "$pyenv_root"/versions/*/bin/python3 2>/dev/null | sort -Vr)

for candidate in "${candidates[@]}"; do
    [ -n "$candidate" ] || continue
    path=$(command -v "$candidate") || continue
    if usable "$path"; then
        echo "$path"
        exit 0
    fi
done
echo "no Python >= 3.12 with venv found; install one (for example python3.12 and python3.12-venv), or set PYTHON=/path/to/python" >&2
exit 1
