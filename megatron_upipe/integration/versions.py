"""Which Megatron-LM this plug-in knows."""

from importlib import import_module
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_upipe.errors import UPipeError

MEGATRON_CORE = SpecifierSet(">=0.19,<0.20")


def megatron_core_version() -> Version:
    """Version of the ``megatron.core`` that would be imported now (a checkout's, if that comes first on ``sys.path``).

    Raises UPipeError when there is none.
    """
    try:
        found = find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UPipeError(f"megatron-core is not installed; install megatron-core{MEGATRON_CORE}")
    return Version(import_module("megatron.core.package_info").__version__)


def check_megatron_version(needed: SpecifierSet | str = MEGATRON_CORE, what: str = "megatron_upipe") -> Version:
    """Returns the Megatron version; raises UPipeError when it lies outside ``needed``."""
    needed = SpecifierSet(str(needed))
    version = megatron_core_version()
    if not needed.contains(version, prereleases=True):
        raise UPipeError(f"{what} needs megatron-core{needed}, found {version}; install a version in that range")
    return version
