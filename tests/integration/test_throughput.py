"""Tokens a second and MFU in the log."""

import re
import time

import pytest
import torch
from end_to_end.training import MODEL, TRAINING, launch
from megatron.core.timers import Timer

from megatron_upipe.integration import throughput


@pytest.mark.parametrize(
    ("card", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA GB200", 2500), ("Some other card", None)],
)
def test_peak_of_a_card(card, peak):
    assert throughput.peak_tflops(card) == peak


def test_line_has_what_is_known():
    line = throughput.throughput_line(7, tokens=2**20, flops=8e15, seconds=4.0, gpus=8, peak=500.0)
    assert line == "iteration 7: 32,768.0 tokens/s/GPU, 250.0 model TFLOP/s/GPU, MFU 50.0% of bf16"
    assert "MFU" not in throughput.throughput_line(7, 1, 1.0, 1.0, 1, None)
    assert "TFLOP" not in throughput.throughput_line(7, 1, None, 1.0, 1, 500.0)


def test_clock_counts_iterations_between_lines():
    clock = throughput._Clock()
    assert clock.seconds(100.0, 1) is None
    assert clock.seconds(130.0, 11) == pytest.approx(3.0)
    assert clock.seconds(142.0, 15) == pytest.approx(3.0)


def test_time_between_lines_is_that_of_training(monkeypatch):
    """Megatron's timer, which stands still during evaluation and while a checkpoint is written."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = Timer("interval-time")
    timer.start()
    time.sleep(0.02)
    timer.stop()
    trained = timer.active_time()
    time.sleep(0.2)  # evaluation
    timer.start()
    timer.elapsed()
    assert 0.02 <= trained <= timer.active_time() < 0.15


def test_training_prints_it_with_log_throughput(tmp_path):
    flags = ["--spec", "megatron_upipe.layer_specs", "upipe_layer_spec", "--context-parallel-size", "2"]
    flags += ["--data-cache-path", str(tmp_path), "--log-throughput", "--upipe-overlap", "on"]
    log = launch(2, *MODEL, *TRAINING, *flags).stdout
    lines = re.findall(r"iteration (\d+): ([\d,.]+) tokens/s/GPU, ([\d,.]+) model TFLOP/s/GPU$", log, re.M)
    assert lines and all(float(tokens.replace(",", "")) > 0 for _, tokens, _ in lines)
    assert "exchange by gloo, beside attention" in log


def test_tokens_of_evaluation_do_not_count(monkeypatch):
    from megatron_upipe.integration import gpt_entry

    counted = []
    monkeypatch.setattr(gpt_entry, "update_seqlen_stats_from_cu_seqlens", counted.append)
    monkeypatch.setattr(gpt_entry, "get_args", lambda: None)
    monkeypatch.setattr(gpt_entry.this_megatron, "sample_length", lambda args: {})
    batch = dict(cu_seqlens=torch.tensor([[0, 3, 8]]), max_seqlen=torch.tensor(5))
    gpt_entry.packed_parameters(batch)
    with torch.no_grad():
        gpt_entry.packed_parameters(batch)
    assert len(counted) == 1
