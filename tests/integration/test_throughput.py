"""Tokens a second and MFU in the log."""

import re

import pytest
from end_to_end.training import MODEL, TRAINING, launch

from megatron_upipe.integration import throughput


@pytest.mark.parametrize(
    ("card", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA GB200", 2500), ("Some other card", None)],
)
def test_peak_of_a_card(card, peak):
    assert throughput.peak_tflops(card) == peak


def test_line_has_what_is_known():
    line = throughput.throughput_line(7, tokens=2**20, flops=8e15, seconds=4.0, gpus=8, peak=500.0)
    assert line == "iteration 7: 32,768.0 tokens/s/GPU, 250.0 model TFLOP/s/GPU, MFU 50.0%"
    assert "MFU" not in throughput.throughput_line(7, 1, 1.0, 1.0, 1, None)
    assert "TFLOP" not in throughput.throughput_line(7, 1, None, 1.0, 1, 500.0)


def test_clock_counts_iterations_between_lines(monkeypatch):
    now = iter([100.0, 130.0, 142.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(now))
    clock = throughput._Clock()
    assert clock.seconds(1) is None
    assert clock.seconds(11) == pytest.approx(3.0)
    assert clock.seconds(15) == pytest.approx(3.0)


def test_training_prints_it_with_log_throughput(tmp_path):
    flags = ["--spec", "megatron_upipe.layer_specs", "upipe_layer_spec", "--context-parallel-size", "2"]
    flags += ["--data-cache-path", str(tmp_path), "--log-throughput", "--upipe-overlap", "on"]
    log = launch(2, *MODEL, *TRAINING, *flags).stdout
    lines = re.findall(r"iteration (\d+): ([\d,.]+) tokens/s/GPU, ([\d,.]+) model TFLOP/s/GPU$", log, re.M)
    assert lines and all(float(tokens.replace(",", "")) > 0 for _, tokens, _ in lines)
    assert "exchange by gloo, beside attention" in log
