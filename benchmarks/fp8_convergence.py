"""Training loss of a demo-sized model in bf16 and with FP8 products (the twin), on this machine's CPUs.

    python benchmarks/fp8_convergence.py --iterations 300

Trains on the demo's text with Megatron's pretrain() on 2 ranks, once in bf16 and once a recipe, from the same weights
and over the same batches; once more in bf16 with all heads in one stage, which differs by roundings only. Prints the
gap of each to bf16, and plots all losses to .demo/fp8_convergence.png (needs matplotlib). Losses are kept in .demo;
--json writes the numbers.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))

from data import prepare
from run import ROOT, Run

# Sizes that every recipe takes: multiples of 128
SIZES = {
    "--hidden-size": 128,
    "--ffn-hidden-size": 256,
    "--kv-channels": 64,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--spec": ("megatron_upipe.layer_specs", "upipe_layer_spec"),
    "--context-parallel-size": 2,
    "--bf16": None,
    "--log-interval": 25,
    "--eval-interval": 100,
    "--eval-iters": 10,
}
FP8 = {"--fp8-format": "hybrid"}
VARIANTS = {
    "bf16": {},
    "bf16, one stage": {"--upipe-heads-per-stage": 8},
    "tensorwise": {**FP8, "--fp8-recipe": "tensorwise"},
    "blockwise": {**FP8, "--fp8-recipe": "blockwise"},
    "mxfp8": {**FP8, "--fp8-recipe": "mxfp8"},
    "tensorwise, attention forward": {**FP8, "--fp8-recipe": "tensorwise", "--upipe-fp8-attention": "forward"},
    # one stage: a rank's KV heads have to be 128 wide together
    "mxfp8, attention full": {
        **FP8,
        **{"--fp8-recipe": "mxfp8", "--upipe-fp8-attention": "full", "--upipe-heads-per-stage": 8},
    },
}
LAST = 50  # iterations that the gap is the mean of


def losses(run: Run) -> tuple[list[float], float]:
    """Of every iteration, and the last one on the validation set."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    training = [record["lm loss"] for record in records if "lm loss" in record]
    return training, [r["final validation lm loss"] for r in records if "final validation lm loss" in r][-1]


def smooth(values: list[float], window: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
        return
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 8), sharex=True, height_ratios=(2, 1))
    base = smooth(curves["bf16"])
    for name, curve in curves.items():
        above.plot(smooth(curve), label=name, linewidth=1)
        below.plot([a - b for a, b in zip(smooth(curve), base, strict=True)], linewidth=1)
    above.set_ylabel("training loss, mean of 10")
    above.legend()
    below.set_ylabel("minus that of bf16")
    below.set_xlabel("iteration")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"plot: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="besides bf16")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    if args.iterations < LAST:
        parser.error(f"--iterations {args.iterations} is too few; the least is {LAST}")
    ROOT.mkdir(exist_ok=True)
    data = ROOT / "python_sources"
    prepare(data)
    common = {**SIZES, "--train-iters": args.iterations, "--lr-warmup-iters": args.iterations // 10}
    found = {}
    for name, flags in VARIANTS.items():
        if args.only and name not in ("bf16", *args.only):
            continue
        run = Run("fp8_" + name.replace(", ", "_").replace(" ", "_"), name, 2, {**common, **flags})
        run.train(data)
        found[name] = losses(run)
    base, base_validation = found["bf16"]
    rows = {}
    print(f"\n{'':32}{f'training, last {LAST}':>20}{'gap':>9}{'validation':>13}{'gap':>9}")
    for name, (curve, validation) in found.items():
        end, reference = statistics.fmean(curve[-LAST:]), statistics.fmean(base[-LAST:])
        gaps = (end / reference - 1, validation / base_validation - 1)
        rows[name] = dict(training=end, training_gap=gaps[0], validation=validation, validation_gap=gaps[1])
        print(f"{name:32}{end:20.4f}{gaps[0]:9.2%}{validation:13.4f}{gaps[1]:9.2%}")
    if args.json:
        Path(args.json).write_text(json.dumps(dict(iterations=args.iterations, rows=rows), indent=1))
    plot({name: curve for name, (curve, _) in found.items()}, ROOT / "fp8_convergence.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
