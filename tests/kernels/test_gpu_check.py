"""``benchmarks/gpu_check.py`` runs on small shapes here, and finds a backend that is wrong."""

import json
import sys
from dataclasses import dataclass

import gpu_check
import gpu_check_fp8

from megatron_upipe.kernels.torch_cpu import TorchCpuKernel
from megatron_upipe.precision.twin import TwinPrecision


def run(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--json", str(out)])
    status = gpu_check.main()
    return status, json.loads(out.read_text())["rows"]


def test_runs(monkeypatch, tmp_path, capsys):
    status, rows = run(monkeypatch, tmp_path)
    assert status == 0 and "0 of 37 checks failed" in capsys.readouterr().out
    fp8 = {"fp8 errors", "fp8 twin", "fp8 pieces", "fp8 speed"}
    assert {row["check"] for row in rows} == {"passed over", "errors", "masks", "merged", "speed", "stages"} | fp8
    stages = next(row for row in rows if row["check"] == "stages" and row["backend"] == "torch-cpu")
    assert stages["counted U 4"] < stages["counted U 32"] and 0 < stages["keep/input"] < 1


@dataclass(frozen=True)
class Wrong(TorchCpuKernel):
    name: str = "wrong"

    def backward(self, *tensors, **masks):
        dq, dk, dv = super().backward(*tensors, **masks)
        return dq, dk * 1.05, dv


def test_a_wrong_precision_is_found(monkeypatch, tmp_path):
    """One that forgets its scale, one that rounds as another recipe does."""
    product, pieces = TwinPrecision.product, TwinPrecision.piece

    def forgets(self, x, w, bias=None):
        return product(self, x, w, bias) * (2 if self.recipe.name == "mxfp8" else 1)

    def rounds(self, data, shared, like, backward):
        return pieces(self, data + data.abs().max() * (self.recipe.name == "blockwise"), shared, like, backward)

    monkeypatch.setattr(gpu_check_fp8.TwinPrecision, "product", forgets)
    monkeypatch.setattr(gpu_check_fp8.TwinPrecision, "piece", rounds)
    status, rows = run(monkeypatch, tmp_path)
    wrong = {row["backend"] for row in rows if row["check"] == "fp8 errors" and not row["good"]}
    assert status == 1 and wrong == {"mxfp8", "blockwise"}


def test_a_wrong_backend_is_found(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check, "KERNELS", (Wrong(),))
    status, rows = run(monkeypatch, tmp_path)
    assert status == 1 and [row["good"] for row in rows if row["check"] == "errors"] == [False] * 4
    assert [row["good"] for row in rows if row["check"] == "masks"] == [False] * 5
    assert "WRONG" in capsys.readouterr().out
