"""Whether TransformerEngine can be used here. Free of its import until asked."""

from __future__ import annotations

from importlib import import_module

from packaging.version import Version

from megatron_upipe.precision.recipes import ALIGNMENT

OLDEST = "2.20"  # signatures were read in 2.20; 2.15 to 2.18 quantise a weight's columns in another way
INSTALL = f"pip install --no-build-isolation 'transformer-engine[pytorch]>={OLDEST}'"
BROKEN = (ImportError, OSError, RuntimeError)
"""What importing a package raises whose libraries do not load."""

_AVAILABLE = dict(tensorwise="is_fp8_available", blockwise="is_fp8_block_scaling_available", mxfp8="is_mxfp8_available")


def refuses_te() -> str | None:
    """Why TransformerEngine cannot be used; None if it can."""
    try:
        import_module("transformer_engine.pytorch")
    except BROKEN as error:
        return f"it cannot be imported ({error}); {INSTALL}"
    found = import_module("transformer_engine").__version__
    if Version(found) < Version(OLDEST):
        return f"version {found} is older than {OLDEST}; {INSTALL}"
    return None


def recipes_here() -> dict[str, str]:
    """For each recipe an empty string, or why this GPU does not have it, as TransformerEngine says."""
    te = import_module("transformer_engine.pytorch")
    found = {name: getattr(te, _AVAILABLE[name])(return_reason=True) for name in ALIGNMENT}
    return {name: "" if good else reason.rstrip(". ") or "not available" for name, (good, reason) in found.items()}
