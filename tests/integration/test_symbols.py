"""The registry of replaced symbols."""

import sys
import types

import pytest

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.symbols import Replacement, SymbolRegistry, for_this_megatron
from megatron_upipe.integration.versions import check_megatron_version


@pytest.fixture
def target():
    """A module with a function and a class with an inherited method."""
    module = types.ModuleType("replaced_target")
    module.f = lambda: "original"

    class Base:
        def method(self):
            return "inherited"

    class Derived(Base):
        pass

    module.Derived = Derived
    sys.modules["replaced_target"] = module
    yield module
    del sys.modules["replaced_target"]


def to(value):
    return lambda original: lambda *args: value


def test_replaces_and_restores(target):
    registry = SymbolRegistry()
    registry.install("me", [Replacement("replaced_target:f", to("new"), "why")])
    assert target.f() == "new"
    assert registry.describe() == ["replaced_target:f (me): why"]
    registry.undo("me")
    assert target.f() == "original" and not registry.installed


def test_undo_keeps_inheritance(target):
    registry = SymbolRegistry()
    registry.install("me", [Replacement("replaced_target:Derived.method", to("new"), "why")])
    assert target.Derived().method() == "new"
    registry.undo("me")
    assert "method" not in vars(target.Derived) and target.Derived().method() == "inherited"


def test_refuses_a_second_replacement_and_undoes_the_first_half(target):
    registry = SymbolRegistry()
    registry.install("me", [Replacement("replaced_target:f", to("mine"), "why")])
    both = [
        Replacement("replaced_target:Derived.method", to("theirs"), "why"),
        Replacement("replaced_target:f", to("theirs"), "why"),
    ]
    with pytest.raises(UPipeError, match="replaced_target:f is already replaced by 'me'"):
        registry.install("them", both)
    assert target.f() == "mine" and target.Derived().method() == "inherited"
    assert registry.owners() == {"me"}


def test_refuses_a_symbol_that_does_not_exist_unless_told(target):
    registry = SymbolRegistry()
    with pytest.raises(UPipeError, match="replaced_target:g does not exist"):
        registry.install("me", [Replacement("replaced_target:g", to(1), "why")])
    registry.install("me", [Replacement("replaced_target:g", to(1), "why", missing_ok=True)])
    assert target.g() == 1
    registry.undo("me")
    assert not hasattr(target, "g")


def test_refuses_a_megatron_outside_the_range():
    symbol = "megatron.core.package_info:__version__"
    registry = SymbolRegistry()
    with pytest.raises(UPipeError, match=r"needs megatron-core>=99, found 0\.1[89]"):
        registry.install("me", [Replacement(symbol, to(1), "why", versions=">=99")])
    assert not registry.installed


def test_version_check_has_both_sides():
    assert check_megatron_version(">=0.18").release[:2] in ((0, 18), (0, 19))
    with pytest.raises(UPipeError, match=r"megatron_upipe needs megatron-core<0\.18, found 0\.1[89]"):
        check_megatron_version("<0.18")


def test_only_what_was_written_for_this_megatron_is_installed():
    ours = [Replacement("replaced_target:f", to(1), "why", versions) for versions in (">=0.18", "<0.18", ">=99")]
    assert [r.versions for r in for_this_megatron(ours)] == [">=0.18"]
