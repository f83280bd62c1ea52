"""Trains a small Llama on real text through Megatron's pretrain() and compares the losses.

The stock spec on 1 rank; the stock spec with TP 2 and sequence parallel on 2 ranks; UPipe on 4 ranks.

Run by ``make demo``. Files go to .demo/ (data, logs, metrics). Exits 1 when the losses do not agree or do not fall.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from data import prepare
from model import MODEL, RING_SIZE, SEQUENCE_LENGTH, TRAINING, ULYSSES_SIZE, UPIPE, as_flags

ROOT = Path(__file__).resolve().parents[2] / ".demo"
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "attention_peak.py"
AGREE = 1e-4  # relative, fp32
FALL = 0.30
# glibc gives large tensors back to the kernel and faults their pages in again at every step; let it keep them.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Run:
    """One training run: ``ranks`` processes with ``flags`` on top of the common ones."""

    name: str
    title: str
    ranks: int
    flags: dict

    @property
    def metrics(self) -> Path:
        return ROOT / f"{self.name}.jsonl"

    def train(self, data: Path) -> None:
        """Trains; Megatron's iteration lines are shown, everything goes to the log."""
        self.metrics.unlink(missing_ok=True)
        log = ROOT / f"{self.name}.log"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)),
            *("-m", "megatron_upipe.run", *as_flags(MODEL, TRAINING, self.flags)),
            *("--data-path", str(data), "--data-cache-path", str(ROOT / "cache")),
            *("--upipe-metrics", str(self.metrics)),
        ]
        print(f"\n== {self.title}: {self.ranks} process{'es' * (self.ranks > 1)} (full log: {log})", flush=True)
        started = time.monotonic()
        threads = str(max(1, (os.cpu_count() or 1) // self.ranks))
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": threads, **MALLOC},
            )
            for line in process.stdout:
                out.write(line)
                if ("iteration " in line and ("lm loss" in line)) or line.startswith("megatron_upipe:"):
                    print(_short(line), flush=True)
        if process.wait() != 0:
            sys.exit(f"{self.title} failed; the last lines of {log}:\n" + "".join(log.open().readlines()[-30:]))
        print(f"   {time.monotonic() - started:.0f} s", flush=True)

    def losses(self) -> dict[str, float]:
        """``{"iteration 3": loss, "validation 20": loss, ...}`` at full precision."""
        found = {}
        for line in self.metrics.read_text().splitlines():
            record = json.loads(line)
            for key, value in record.items():
                if key.endswith("lm loss"):
                    found[f"{key.removesuffix('lm loss').strip() or 'iteration'} {record['iteration']}"] = value
        return found


RUNS = (
    Run("stock", "stock, 1 rank", 1, {}),
    Run("tp", "stock, TP 2", 2, {"--tensor-model-parallel-size": 2, "--sequence-parallel": None}),
    Run("upipe", f"UPipe {ULYSSES_SIZE} x {RING_SIZE}", ULYSSES_SIZE * RING_SIZE, UPIPE),
)


def _short(line: str) -> str:
    """Megatron's iteration line without its clock and counters."""
    parts = [part.strip() for part in line.split("|")]
    keep = [part for part in parts if re.search(r"iteration +\d|elapsed time|loss|megatron_upipe", part)]
    return "   " + " | ".join([re.sub(r"^\[.*?\] *", "", keep[0]), *keep[1:]])


def compare(reference: Run, others: tuple[Run, ...]) -> bool:
    """Prints the losses side by side; whether they agree and fall."""
    wanted, found = reference.losses(), [run.losses() for run in others]
    for run, losses in zip(others, found, strict=True):
        if losses.keys() != wanted.keys():
            print(f"{run.title} recorded other iterations: {sorted(losses.keys() ^ wanted.keys())}")
            return False
    print(f"\n{'loss at':16}{reference.title:>16}" + "".join(f"{run.title:>16}{'difference':>12}" for run in others))
    worst = 0.0
    for key, value in wanted.items():
        row = f"{key:16}{value:16.6f}"
        for losses in found:
            difference = abs(losses[key] - value) / abs(value)
            worst = max(worst, difference)
            row += f"{losses[key]:16.6f}{difference:12.1e}"
        print(row)
    training = [value for key, value in wanted.items() if key.startswith("iteration")]
    fall = 1 - training[-1] / training[0]
    agree, falls = worst <= AGREE, fall >= FALL
    print(f"\nlargest relative difference {worst:.1e} (at most {AGREE:.0e}: {'yes' if agree else 'NO'})")
    print(f"loss fell by {fall:.0%} (at least {FALL:.0%}: {'yes' if falls else 'NO'})")
    return agree and falls


def show_peaks() -> None:
    """Prints the measured peak bytes of one attention block of the demo's size: plain Ulysses against UPipe."""
    heads, least = MODEL["--num-attention-heads"], ULYSSES_SIZE
    sizes = {
        "--ulysses": ULYSSES_SIZE,
        "--ring": RING_SIZE,
        "--heads-per-stage": (heads, least),
        "--heads": heads,
        "--kv-heads": MODEL["--num-query-groups"],
        "--head-dim": MODEL["--hidden-size"] // heads,
        "--hidden": MODEL["--hidden-size"],
        "--seq-length": SEQUENCE_LENGTH,
        "--json": None,
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ULYSSES_SIZE * RING_SIZE), str(BENCHMARK), *as_flags(sizes)),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode != 0:
        sys.exit(f"{BENCHMARK} failed:\n{done.stderr[-3000:]}")
    peaks = json.loads(done.stdout.strip().splitlines()[-1])["peak_bytes"]
    ulysses, upipe = peaks[str(heads)], peaks[str(least)]
    print("\npeak of one attention block, forward and backward, measured (live bytes on rank 0):")
    print(f"   U = H = {heads} (plain Ulysses) {ulysses:12,} bytes")
    print(f"   U = P = {least} (UPipe)         {upipe:12,} bytes, {1 - upipe / ulysses:.0%} less")


def main() -> int:
    started = time.monotonic()
    data = ROOT / "python_sources"
    prepare(data)
    for run in RUNS:
        run.train(data)
    good = compare(RUNS[0], RUNS[1:])
    show_peaks()
    print(f"demo took {time.monotonic() - started:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
