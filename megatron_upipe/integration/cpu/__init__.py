"""CPU stand-in: unmodified Megatron-LM trains on gloo, without a GPU.

For trying out, tests and simulation. It answers only Megatron's calls (and those of the script that the launcher runs):
every other caller of ``torch.cuda`` still sees a machine without a GPU. See ``stand_in`` for what is replaced and
``flags`` for the Megatron flags that get other defaults.
"""

from megatron_upipe.integration.cpu.stand_in import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
