"""The benchmarks run, and what they report is what they saw."""

import json
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
SIZES = [
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "8",
    "--hidden",
    "16",
    "--warm-up",
    "1",
    "--error-tokens",
    "32",
]


def run(script, *flags, ranks=1):
    done = forked.run(ranks, [str(ROOT / "benchmarks" / script), *flags, "--json"])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_blocks_side_by_side(tmp_path):
    plot = tmp_path / "ratios.png"
    methods = ["ulysses", "ulysses+recompute", "upipe", "upipe+overlap", "ring"]
    left_out = ["no-such-method", "upipe+overlp", "usp"]
    flags = [*SIZES, "--tokens", "64", "128", "--pairs", "3", "--profile", "--plot", str(plot)]
    found = run("methods.py", *flags, "--methods", *methods, *left_out, ranks=2)
    assert plot.stat().st_size > 1000
    assert [length["tokens"] for length in found["lengths"]] == [64, 128]
    for length in found["lengths"]:
        rows = length["methods"]
        assert set(rows) == set(methods)
        assert all(row["low"] <= row["ratio"] <= row["high"] and row["peak_bytes"] > 0 for row in rows.values())
        assert rows["upipe"]["collectives"] == rows["upipe+overlap"]["collectives"] == {"exchange": 2 * 2 * 2}
        assert rows["ulysses"]["collectives"] == {"exchange": 2 * 2}
        assert rows["upipe"]["sent_bytes"] == rows["ulysses"]["sent_bytes"]
        assert rows["upipe"]["sent_bytes"]["exchange"] < rows["ulysses+recompute"]["sent_bytes"]["exchange"]
        assert set(rows["ring"]["sent_bytes"]) == {"ring"}
        assert any("attention" in part for part in rows["upipe"]["stage_ms"])
    assert all(0 < error < 1e-5 for errors in found["errors"].values() for error in errors.values())


def test_layers_side_by_side():
    flags = [
        *SIZES,
        "--scope",
        "layer",
        "--tokens",
        "64",
        "--pairs",
        "2",
        "--methods",
        "ulysses+recompute",
        "upipe+keep",
    ]
    rows = run("methods.py", *flags, ranks=2)["lengths"][0]["methods"]
    assert rows["upipe+keep"]["sent_bytes"]["exchange"] < rows["ulysses+recompute"]["sent_bytes"]["exchange"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "0"], "--pairs 0 is too few; the least is 1"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png is not a picture in an existing folder"),
        (["--scope", "layer", "--methods", "upipe+kept"], "--methods upipe+kept: there are layers ulysses+recompute"),
        (["--tokens", "258"], "--tokens 258 is not a multiple of 2 x 2 ranks; the nearest is 256"),
        (
            ["--tokens", "64", "--error-tokens", "3"],
            "--error-tokens 3 is not a multiple of 2 x 2 ranks; the nearest is 4",
        ),
        (
            ["--tokens", "64", "--baseline", "usp", "--methods", "upipe"],
            "--baseline usp is not among the methods upipe",
        ),
    ],
)
def test_refused_in_one_sentence(flags, message):
    done = forked.run(2, [str(ROOT / "benchmarks" / "methods.py"), *flags])
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_scaling_fits_exponents():
    flags = ["--tokens", "128", "256", "--ranks", "2", "--methods", "ulysses", "upipe", "--pairs", "1"]
    found = run("scaling.py", *flags)
    for name in ("ulysses", "upipe"):
        assert found["over_tokens"]["2"][name]["sent_bytes"] == pytest.approx(1)
