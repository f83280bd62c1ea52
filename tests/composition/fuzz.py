"""``make fuzz GRIDS=200 SEED=0``: the composition test on as many random grids as asked for."""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

from composition.grids import draw
from composition.test_composition import check
from workers import WorkerPool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grids", type=int, default=200, help="number of grids")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first grid; the others follow")
    args = parser.parse_args()
    pool, failures, worst, started = WorkerPool(), [], (0.0, ""), time.monotonic()
    for index, seed in enumerate(range(args.seed, args.seed + args.grids), start=1):
        try:
            worst = max(worst, check(pool, draw(seed)))
        except AssertionError as error:
            failures.append(seed)
            print(f"\nseed {seed} failed: {error}", flush=True)
        minutes = (time.monotonic() - started) / 60
        print(f"\r{index} of {args.grids} grids, {len(failures)} failed, {minutes:.1f} min", end="", flush=True)
    pool.close()
    print(f"\nlargest relative error of the grids that passed: {worst[0]:.1e} ({worst[1]})")
    print(f"failed seeds: {failures}" if failures else "all grids equal the unsharded stock run")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
