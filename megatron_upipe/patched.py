"""What a training script of a patched Megatron-LM checkout calls (``patches/apply.py``), before it imports Megatron."""

from megatron_upipe.integration.launcher import install_into_script

__all__ = ["install_into_script"]
