#!/usr/bin/env bash
# Slurm's daemons and munge from the distribution's packages, for `make test-slurm`, which starts its own.
set -euo pipefail
missing=()
for program in slurmctld slurmd munged sbatch; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0
if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
    echo "${missing[*]} not found; install the packages slurm-wlm and munge (as root, on Debian or Ubuntu)" >&2
    exit 1
fi
install() { DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge >/dev/null; }
install || { apt-get update -qq && install; }
