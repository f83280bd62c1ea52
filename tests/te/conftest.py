"""``te``: TransformerEngine's functions, bound to their signatures, computing on the CPU.

With TransformerEngine installed (``make test-te``) its own classes and signatures, else those recorded.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from te import compute, recorded

REAL = find_spec("transformer_engine") is not None


@pytest.fixture(params=[False, True], ids=["Hopper", "Blackwell"])
def te(monkeypatch, request):
    compute.CALLS.clear()
    monkeypatch.setattr(compute, "ONE_COPY_SERVES", request.param)
    if REAL:
        _real(monkeypatch)
    else:
        _recorded(monkeypatch)
    return compute.CALLS


def _recorded(monkeypatch):
    for name, contents in recorded.MODULES.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path])
        for attribute, value in contents.items():
            setattr(sys.modules[name], attribute, value)
    for name, functions in recorded.FUNCTIONS.items():
        for function in functions:
            setattr(sys.modules[name], function, recorded.bound(recorded.MODULES[name][function]))


def _real(monkeypatch):
    """Only what needs a GPU is replaced: casts, transposes, products, attention."""
    import_module(recorded.P)
    for name, functions in recorded.FUNCTIONS.items():
        module = import_module(name)
        for function in functions:
            monkeypatch.setattr(module, function, recorded.bound(getattr(module, function)))
    storage = import_module(f"{recorded.P}.tensor.storage.float8_tensor_storage")
    monkeypatch.setattr(storage, "is_non_tn_fp8_gemm_supported", lambda: compute.ONE_COPY_SERVES)
    monkeypatch.setattr(storage.Float8TensorStorage, "_create_transpose", _transpose)
    for name in ("float8_tensor", "float8_blockwise_tensor", "mxfp8_tensor"):
        module = import_module(f"{recorded.P}.tensor.{name}")
        for quantizer in recorded.MODULES[module.__name__]:

            def impl(self, tensor):
                return compute.quantise(self, tensor, storage.Float8TensorStorage)

            monkeypatch.setattr(getattr(module, quantizer), "quantize_impl", impl)
            monkeypatch.setattr(getattr(module, quantizer), "quantize", lambda self, t, **_: self.quantize_impl(t))


def _transpose(self):
    self._transpose, self._transpose_invalid = self._data.t().contiguous(), False


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield
