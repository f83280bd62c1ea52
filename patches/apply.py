#!/usr/bin/env python3
"""Patches a Megatron-LM checkout, so that its training scripts take megatron_upipe's flags without the launcher.

    python patches/apply.py /path/to/Megatron-LM             # verify, apply, verify again
    python patches/apply.py /path/to/Megatron-LM --check     # only say what state it is in
    python patches/apply.py /path/to/Megatron-LM --revert

Three lines go into pretrain_gpt.py and pretrain_hybrid.py. A checkout whose scripts are not known to the byte is
refused: the patches have no context lines, and would go anywhere. Needs git, and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSERTED = """\
from megatron_upipe.patched import install_into_script  # by megatron_upipe's patches/apply.py

install_into_script(__name__)

"""
# Series of releases -> script -> git's hash of it, as `git rev-parse core_v0.19.0:pretrain_gpt.py` prints it
KNOWN = {
    "0.18": {
        "pretrain_gpt.py": "8fc21ed4c0ce3a8bb31b0012216d9b23c0cd39a8",
        "pretrain_hybrid.py": "110ffabc11e8a4f000cfe2bed1f1200d3b491af1",
    },
    "0.19": {
        "pretrain_gpt.py": "47c1935eb90ccac190b8c2934193e0d91bf99199",
        "pretrain_hybrid.py": "39bc7f30b57615c1defc7ab487c8639781ed23d3",
    },
}
BY_HAND = "run it through the launcher (-m megatron_upipe.run), or insert these lines before its imports by hand:\n\n"


class RefusedError(Exception):
    """One sentence for the user."""


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 if the checkout is refused."""
    parser = argparse.ArgumentParser(
        prog="apply.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="folder of a Megatron-LM checkout")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="change nothing")
    action.add_argument("--revert", action="store_true", help="take the lines out again")
    given = parser.parse_args(argv)
    try:
        print(run(given.checkout.resolve(), given.check, given.revert))
    except RefusedError as refusal:
        print(f"apply.py: error: {refusal}", file=sys.stderr)
        return 2
    return 0


def run(checkout: Path, check: bool = False, revert: bool = False) -> str:
    """Applies, reverts or only looks; a sentence about it. Raises RefusedError, and then nothing is changed."""
    version = series(checkout)
    patched = state(checkout, version)
    found = f"{checkout} (Megatron-LM {version}) is {'patched' if patched else 'not patched'}"
    if check or patched != revert:
        return found
    changed = changes(checkout) - (set(KNOWN[version]) if revert else set())
    if changed:
        raise RefusedError(f"{checkout} has uncommitted changes ({', '.join(sorted(changed))}); commit or stash them")
    patch = HERE / f"core_v{version}.x.patch"
    before = {checkout / name: (checkout / name).read_bytes() for name in KNOWN[version]}
    try:
        git(checkout, "apply", "--unidiff-zero", *(["--reverse"] if revert else []), str(patch))
        if state(checkout, version) == revert:
            raise RefusedError(f"{patch} did not change {checkout}; is it complete?")
    except RefusedError as refusal:
        for script, content in before.items():
            if script.read_bytes() != content:
                script.write_bytes(content)
        raise RefusedError(f"git did not apply the patch as it stands, and nothing was changed: {refusal}") from refusal
    if revert:
        return f"{checkout} (Megatron-LM {version}) is as it was"
    return (
        f"{checkout} (Megatron-LM {version}) is patched; try: torchrun {checkout / 'pretrain_gpt.py'} <flags> "
        "--spec megatron_upipe.layer_specs upipe_layer_spec"
    )


def series(checkout: Path) -> str:
    """The checkout's series of releases, such as 0.19. Raises RefusedError."""
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        raise RefusedError(f"{checkout} is no Megatron-LM checkout: it has no megatron/core/package_info.py")
    found = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)$", info.read_text(encoding="utf-8"), re.MULTILINE))
    version = f"{found.get('MAJOR')}.{found.get('MINOR')}"
    if version not in KNOWN:
        raise RefusedError(f"{checkout} is Megatron-LM {version}; there are patches for {' and '.join(KNOWN)}")
    return version


def state(checkout: Path, version: str) -> bool:
    """Whether the scripts are patched. Raises RefusedError for one that is neither stock nor patched."""
    found = set()
    for name, known in KNOWN[version].items():
        script = checkout / name
        if not script.is_file():
            raise RefusedError(f"{checkout} has no {name}; check it out again")
        content = script.read_bytes()
        if b"\r\n" in content:
            raise RefusedError(f"{script} has Windows line ends; check it out with git's core.autocrlf off")
        stock = content.replace(INSERTED.encode(), b"", 1)
        if content_hash(stock) != known:
            raise RefusedError(f"{script} is not that of a release of {version}; {BY_HAND}{INSERTED}")
        found.add(stock != content)
    if len(found) > 1:
        raise RefusedError(f"only some of {', '.join(KNOWN[version])} in {checkout} are patched; check them out again")
    return found.pop()


def content_hash(content: bytes) -> str:
    """As ``git hash-object`` prints it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def changes(checkout: Path) -> set[str]:
    """Tracked files with uncommitted changes; none in a folder that is no repository."""
    if not (checkout / ".git").exists():
        return set()
    lines = git(checkout, "status", "--porcelain", "--untracked-files=no").splitlines()
    return {line[3:] for line in lines}


def git(checkout: Path, *words: str) -> str:
    """Runs git in the checkout, blind to a repository around it. Raises RefusedError."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    done = subprocess.run(["git", *words], cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RefusedError(f"git {' '.join(words)} failed in {checkout}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
