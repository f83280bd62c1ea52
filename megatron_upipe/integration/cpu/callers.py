"""Who is calling: replaced torch functions answer Megatron only."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

# The built-in entry stands where a training script does.
PACKAGES = ("megatron.", "__main__", "megatron_upipe.integration.gpt_entry")


def called_by_megatron(depth: int = 2) -> bool:
    """Whether the function ``depth`` frames up belongs to Megatron or to the script that runs as ``__main__``."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name.startswith(PACKAGES)


def for_megatron(answer: Callable) -> Callable[[Callable | None], Callable]:
    """``make`` of a replacement that calls ``answer`` for Megatron and the original for everyone else."""

    def make(original: Callable | None) -> Callable:
        @wraps(original or answer)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if called_by_megatron():
                return answer(*args, **kwargs)
            if original is None:
                raise AttributeError(f"torch has no {answer.__name__} on this machine")
            return original(*args, **kwargs)

        return replaced

    return make
