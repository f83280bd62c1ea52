#!/usr/bin/env python3
"""Writes the parts of docs/ that are made from the code: the flags table and the list of refusals.

.venv/bin/python tools/doc_tables.py            # after a flag or a message has changed
.venv/bin/python tools/doc_tables.py --check    # exit status 1 if docs/ is out of date; the tests do this
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_upipe"
FLAGS, REFUSALS = ROOT / "docs" / "flags.md", ROOT / "docs" / "refusals.md"

# package folder -> title; the order of the list
PLACES = {
    "checks.py": "Model and parallelism",
    "config.py": "Settings",
    "attention": "Attention",
    "context": "Context parallelism and packed documents",
    "kernels": "Attention backends",
    "precision": "FP8",
    "layers": "Layers and specs",
    "memory": "Host memory",
    "integration": "Launcher, flags, Megatron-LM",
    "planning": "megatron-upipe simulate, plan, fit",
}


def flags_table() -> str:
    """Every flag of the plug-in, as its parser explains it."""
    from megatron_upipe.integration.flags import add_upipe_flags

    parser = add_upipe_flags(argparse.ArgumentParser(add_help=False))
    rows = ["| flag | values | |", "|---|---|---|"]
    for action in parser._actions:
        choices = " ".join(f"`{choice}`" for choice in action.choices or ())
        values = choices or (f"`{action.metavar}`" if action.metavar else "")
        text = (action.help % vars(action)).replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}` | {values.replace('|', '\\|')} | {text} |")
    return "\n".join(rows) + "\n"


def refusals() -> str:
    """Every sentence of a UPipeError, with ... for what is filled in, by the part of the package."""
    parts = []
    for place, title in PLACES.items():
        path = PACKAGE / place
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        found = dict.fromkeys(s for file in files for s in sentences(file.read_text(encoding="utf-8")))
        if found:
            parts.append(f"## {title}\n\n" + "\n".join(f"- {sentence}" for sentence in found) + "\n")
    return "\n".join([*parts, unsupported()])


def unsupported() -> str:
    """Megatron's flags that UPipe refuses by a table."""
    from megatron_upipe.checks import REFUSALS

    rows = [
        "## Megatron-LM's flags that are not supported with context parallelism\n",
        "| flag | instead |",
        "|---|---|",
    ]
    for rule in REFUSALS:
        instead = rule.instead if isinstance(rule.instead, str) else "windows are causal, (tokens to the left, 0)"
        rows.append(f"| `{rule.flag}` | {instead} |")
    return "\n".join(rows) + "\n"


def sentences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("UPipeError", "RefusedError")):
            continue
        text = template(node.args[0]) if node.args else ""
        if text.strip(" .…") and not text.startswith("…"):
            found.append((node.lineno, text))
    return [text for _, text in sorted(found)]


def template(node: ast.expr) -> str:
    """A string with … for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    return "…"


def with_part(path: Path, part: str) -> str:
    """The text above the marker, then ``part``."""
    marker = "<!-- from here on: tools/doc_tables.py -->\n"
    above = path.read_text(encoding="utf-8").split(marker)[0]
    return f"{above}{marker}\n{part}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(argv)
    stale = []
    for path, part in ((FLAGS, flags_table()), (REFUSALS, refusals())):
        wanted = with_part(path, part)
        if path.read_text(encoding="utf-8") != wanted:
            stale.append(path.name)
            if not given.check:
                path.write_text(wanted, encoding="utf-8")
    print(f"docs: {', '.join(stale)} {'out of date' if given.check else 'written'}" if stale else "docs: up to date")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
