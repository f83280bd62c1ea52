"""Registry of replaced symbols: the only place where an attribute of Megatron or torch is assigned.

A symbol is written ``package.module:attribute`` (``megatron.training.initialize:_warmup_jit_function``,
``torch:Tensor.cuda``). Each replacement says why it exists and for which Megatron versions it was written; a second
replacement of the same symbol is refused, and every replacement can be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from packaging.specifiers import SpecifierSet

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.versions import MEGATRON_CORE, check_megatron_version, megatron_core_version

_MISSING = object()


@dataclass(frozen=True)
class Replacement:
    """How one symbol is replaced: ``make(original)`` returns what takes its place.

    ``missing_ok``: the symbol need not exist; ``make`` then receives None, and undo deletes the attribute.
    """

    symbol: str
    make: Callable[[Any], Any]
    why: str
    versions: str = str(MEGATRON_CORE)
    missing_ok: bool = False


def for_this_megatron(replacements: list[Replacement]) -> list[Replacement]:
    """Of ``replacements``, those written for the installed Megatron; the others name another version's symbols."""
    version = megatron_core_version()
    return [r for r in replacements if SpecifierSet(r.versions).contains(version, prereleases=True)]


@dataclass
class _Installed:
    holder: Any
    name: str
    original: Any  # as found in the holder's own dictionary, so that undo keeps inheritance and descriptors
    owner: str
    replacement: Replacement


@dataclass
class SymbolRegistry:
    """Installed replacements, in order of installation. ``registry`` below is the process-wide one."""

    installed: dict[str, _Installed] = field(default_factory=dict)

    def install(self, owner: str, replacements: list[Replacement]) -> None:
        """Installs all replacements of one owner, or none.

        Raises UPipeError when a symbol is already replaced, does not exist, or was written for another Megatron.
        """
        done: list[str] = []
        try:
            for replacement in replacements:
                self._install_one(owner, replacement)
                done.append(replacement.symbol)
        except BaseException:
            for symbol in reversed(done):
                self._undo_one(symbol)
            raise

    def undo(self, owner: str) -> None:
        """Restores every symbol that ``owner`` replaced, last one first."""
        for symbol in [s for s, i in reversed(self.installed.items()) if i.owner == owner]:
            self._undo_one(symbol)

    def owners(self) -> set[str]:
        return {i.owner for i in self.installed.values()}

    def describe(self) -> list[str]:
        """One line for each replaced symbol."""
        return [f"{s} ({i.owner}): {i.replacement.why}" for s, i in self.installed.items()]

    def _install_one(self, owner: str, replacement: Replacement) -> None:
        symbol = replacement.symbol
        if symbol in self.installed:
            raise UPipeError(
                f"{symbol} is already replaced by '{self.installed[symbol].owner}'; '{owner}' cannot replace it again"
            )
        if symbol.startswith("megatron."):
            check_megatron_version(replacement.versions, f"the replacement of {symbol}")
        holder, name = _holder(symbol)
        original = getattr(holder, name, _MISSING)
        if original is _MISSING and not replacement.missing_ok:
            raise UPipeError(f"{symbol} does not exist in this installation; megatron_upipe cannot replace it")
        new = replacement.make(None if original is _MISSING else original)
        own = vars(holder).get(name, _MISSING)
        setattr(holder, name, new)
        self.installed[symbol] = _Installed(holder, name, own, owner, replacement)

    def _undo_one(self, symbol: str) -> None:
        installed = self.installed.pop(symbol)
        if installed.original is _MISSING:
            delattr(installed.holder, installed.name)
        else:
            setattr(installed.holder, installed.name, installed.original)


def _holder(symbol: str) -> tuple[Any, str]:
    module, _, path = symbol.partition(":")
    *parents, name = path.split(".")
    holder = import_module(module)
    for parent in parents:
        holder = getattr(holder, parent)
    return holder, name


registry = SymbolRegistry()
