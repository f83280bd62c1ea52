"""The launcher: installs the plug-in into Megatron-LM, then runs a training script or the built-in GPT entry."""

import atexit
import os
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.versions import check_megatron_version

OWNER = "launcher"
REFUSED = 2  # exit status

HELP = """\
usage: torchrun [torchrun options] -m megatron_upipe.run [script.py] <Megatron-LM flags> [plug-in flags]

Runs an unmodified Megatron-LM training script (pretrain_gpt.py of a checkout) with the plug-in's flags added to
Megatron's own, or, without a script, the built-in GPT entry on the installed megatron-core.

  torchrun --nproc-per-node 8 -m megatron_upipe.run pretrain_gpt.py --num-layers 32 ...
  torchrun --nproc-per-node 2 -m megatron_upipe.run --num-layers 2 --mock-data ...

Without a GPU the CPU stand-in is used (gloo; for trying out and tests).
--megatron-help lists Megatron's flags together with the plug-in's.
"""


def main(argv: list[str]) -> int:
    """Runs ``argv`` (without the program's name). Returns the exit status; a refusal is one sentence on stderr."""
    try:
        return _run(argv)
    except UPipeError as error:
        _say_refusal(error)
        return REFUSED


def install_into_script(name: str) -> None:
    """What the launcher does, for a script that runs without it; ``name`` is the script's ``__name__``.

    Does nothing in a script that is imported, or that the launcher runs. A refusal ends the process as it does there.
    """
    from megatron_upipe.integration.symbols import registry

    if name != "__main__" or OWNER in registry.owners():
        return
    show = sys.excepthook

    def one_sentence(kind: type, error: BaseException, trace: Any) -> None:
        if not isinstance(error, UPipeError):
            show(kind, error, trace)
            return
        _say_refusal(error)
        sys.stdout.flush()
        os._exit(REFUSED)  # an exception hook cannot say with which status to exit

    sys.excepthook = one_sentence
    _warn_once()
    check_megatron_version()
    install(force_cpu="--upipe-cpu" in sys.argv)
    atexit.register(_leave_groups)


def _say_refusal(error: UPipeError) -> None:
    # A refusal comes from configuration and is the same on every rank: local rank 0 speaks first, and the others
    # only if nobody ends them meanwhile.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)
    # Megatron's build_module appends " when instantiating ..." at each level
    sentence = str(error).split(" when instantiating ")[0]
    print(f"megatron_upipe: error: {sentence}", file=sys.stderr, flush=True)


def _warn_once() -> None:
    """Megatron's warnings, on rank 0 only."""
    if os.environ.get("RANK", "0") != "0":
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")


def _run(argv: list[str]) -> int:
    script = argv[0] if argv and not argv[0].startswith("-") else None
    flags = argv[1:] if script else argv
    if not argv or (script is None and flags[0] in ("-h", "--help")):
        _print_help()
        return 0 if argv else 2
    flags = ["--help" if flag == "--megatron-help" else flag for flag in flags]
    if script is not None:
        if not Path(script).is_file():
            raise UPipeError(f"script {script} is not a file; name one, or leave it out for the built-in GPT entry")
        # As the interpreter does for a script: its own megatron/ folder wins over the installed one.
        sys.path.insert(0, str(Path(script).resolve().parent))
    _warn_once()
    check_megatron_version()
    install(force_cpu="--upipe-cpu" in flags)
    sys.argv = [script or "megatron_upipe.run", *flags]
    if script is not None:
        runpy.run_path(script, run_name="__main__")
    else:
        from megatron_upipe.integration import gpt_entry

        gpt_entry.main()
    _leave_groups()
    return 0


def _leave_groups() -> None:
    """Ends gloo's and NCCL's threads; interpreters that exit over them abort now and then."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def install(force_cpu: bool = False) -> None:
    """Installs the plug-in's replacements, and the CPU stand-in if asked for or if there is no GPU. Not collective.

    Raises UPipeError when it is already installed, or when a GPU is there but torch cannot use it.
    """
    import torch

    from megatron_upipe.integration import cpu, flags, language_models, metrics, packed_batch, startup, upipe_spec
    from megatron_upipe.integration.symbols import for_this_megatron, registry

    if not force_cpu and not torch.cuda.is_available():
        if Path("/dev/nvidiactl").exists():
            raise UPipeError("this machine has an NVIDIA driver but torch cannot use it; mend it, or pass --upipe-cpu")
        force_cpu = True
    if force_cpu:
        _set_connections()
        cpu.install()
    registry.install(
        OWNER,
        for_this_megatron(
            [
                *startup.replacements(),
                *flags.replacements(),
                *language_models.replacements(),
                *metrics.replacements(),
                *upipe_spec.replacements(),
                *packed_batch.replacements(),
            ]
        ),
    )


def _set_connections() -> None:
    """Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 with TP or CP, and the opposite with Megatron-FSDP."""
    if "--use-megatron-fsdp" in sys.argv:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    else:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _print_help() -> None:
    from argparse import ArgumentParser

    from megatron_upipe.integration.flags import add_upipe_flags

    parser = add_upipe_flags(ArgumentParser(prog="megatron_upipe.run", add_help=False, usage=""))
    print(HELP + "\n" + parser.format_help().removeprefix("usage: \n\n"), end="")
