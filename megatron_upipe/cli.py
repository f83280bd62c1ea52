"""``megatron-upipe``: the command-line tool."""

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version

from megatron_upipe import __version__
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest import launch
from megatron_upipe.planning import command as simulate
from megatron_upipe.planning import fit_command as fit
from megatron_upipe.planning import plan_command as plan

PLANNING = {"simulate": simulate, "fit": fit, "plan": plan}
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn")


def info() -> dict[str, str | int | None]:
    """What is installed, for bug reports."""
    import torch

    found: dict[str, str | int | None] = {"megatron-upipe": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["gpus"] = torch.cuda.device_count()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-upipe", description="Tools around megatron_upipe. Training: python -m megatron_upipe.run --help"
    )
    parser.add_argument("--version", action="version", version=f"megatron-upipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info_parser = commands.add_parser("info", help="versions of what is installed, and the number of GPUs")
    info_parser.add_argument("--json", action="store_true", help="print JSON")
    for name, module, text in (
        ("selftest", launch, "compare UPipe with Megatron's attention on this machine"),
        ("simulate", simulate, "memory, traffic and work of a training step, without a GPU"),
        ("fit", fit, "whether a training command line fits, for launch scripts"),
        ("plan", plan, "the longest context that fits, or the fastest configuration for a length, with its flags"),
    ):
        module.add_arguments(
            commands.add_parser(
                name,
                help=text,
                description=module.DESCRIPTION,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    try:
        if args.command in PLANNING:
            return PLANNING[args.command].main(args)
        return launch.main(args, argv) if args.command == "selftest" else _print_info(args.json)
    except UPipeError as error:
        print(f"megatron-upipe: error: {error}", file=sys.stderr)
        return 2


def _print_info(as_json: bool) -> int:
    found = info()
    if as_json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:20} {'not installed' if value is None else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
