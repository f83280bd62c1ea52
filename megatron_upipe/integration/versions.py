"""Which Megatron-LM this plug-in knows."""

from importlib import import_module, util

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_upipe.errors import UPipeError

MEGATRON_CORE = SpecifierSet(">=0.18,<0.20")


def megatron_core_version() -> Version:
    """Version of the ``megatron.core`` that would be imported now (a checkout's, if that comes first on ``sys.path``).

    Raises UPipeError when there is none.
    """
    parent = util.find_spec("megatron")
    if parent is None:
        raise UPipeError(f"megatron-core is not installed; install megatron-core{MEGATRON_CORE}")
    where = ", ".join(parent.submodule_search_locations or ["a module file"])
    try:
        version = import_module("megatron.core.package_info").__version__
    except ImportError:
        raise UPipeError(f"{where} comes first on the path and has no megatron.core with package_info.py") from None
    try:
        return Version(version)
    except InvalidVersion:
        raise UPipeError(f"megatron.core in {where} calls itself {version}, which is no version number") from None


def check_megatron_version(needed: SpecifierSet | str = MEGATRON_CORE, what: str = "megatron_upipe") -> Version:
    """Returns the Megatron version; raises UPipeError when it lies outside ``needed``."""
    needed = SpecifierSet(str(needed))
    version = megatron_core_version()
    if not needed.contains(version, prereleases=True):
        raise UPipeError(f"{what} needs megatron-core{needed}, found {version}; install a version in that range")
    return version
