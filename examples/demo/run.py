"""Trains a small Llama on real text through Megatron's pretrain(), in two layouts, and compares them.

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
from model import MODEL, TRAINING, as_flags

ROOT = Path(__file__).resolve().parents[2] / ".demo"
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
        print(f"\n== {self.title}: {self.ranks} rank{'s' * (self.ranks > 1)} (everything: {log})", flush=True)
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
    Run("stock", "stock spec on 1 rank", 1, {}),
    Run(
        "tp2",
        "stock spec, TP 2 + sequence parallel",
        2,
        {"--tensor-model-parallel-size": 2, "--sequence-parallel": None},
    ),
)


def _short(line: str) -> str:
    """Megatron's iteration line without its clock and counters."""
    parts = [part.strip() for part in line.split("|")]
    keep = [part for part in parts if re.search(r"iteration +\d|elapsed time|loss|megatron_upipe", part)]
    return "   " + " | ".join([re.sub(r"^\[.*?\] *", "", keep[0]), *keep[1:]])


def compare(reference: Run, other: Run) -> bool:
    """Prints the losses side by side; whether they agree and fall."""
    a, b = reference.losses(), other.losses()
    if a.keys() != b.keys():
        print(f"the runs recorded different iterations: {sorted(a.keys() ^ b.keys())}")
        return False
    print(f"\n{'':16}{reference.title:>32}{other.title:>40}{'relative difference':>22}")
    worst = 0.0
    for key in a:
        difference = abs(a[key] - b[key]) / abs(a[key])
        worst = max(worst, difference)
        print(f"{key:16}{a[key]:32.6f}{b[key]:40.6f}{difference:22.1e}")
    training = [value for key, value in a.items() if key.startswith("iteration")]
    fall = 1 - training[-1] / training[0]
    agree, falls = worst <= AGREE, fall >= FALL
    print(f"\nlargest relative difference {worst:.1e} (at most {AGREE:.0e}: {'yes' if agree else 'NO'})")
    print(f"loss fell by {fall:.0%} (at least {FALL:.0%}: {'yes' if falls else 'NO'})")
    return agree and falls


def main() -> int:
    started = time.monotonic()
    data = ROOT / "python_sources"
    prepare(data)
    for run in RUNS:
        run.train(data)
    good = compare(*RUNS)
    print(f"demo took {time.monotonic() - started:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
