"""The .sbatch files for GPUs: their flags are Megatron's and UPipe's, pass every check, and fit by simulation."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from integration.test_memory_flags import installed  # noqa: F401
from megatron_version import BEFORE_019

from megatron_upipe.integration import flags

SLURM = Path(__file__).parents[2] / "examples" / "slurm"
FILES = sorted(path.stem for path in SLURM.glob("*nodes.sbatch")) + sorted(p.stem for p in SLURM.glob("*1node.sbatch"))
# Instead of launch.sh: what the file would train with.
STUB = """
RUN_DIR=runs
choose_data() { VOCABULARY=$1; DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$1"); }
run() {
    printf '%q ' --vocab-size $VOCABULARY
    echo
    printf '%q ' "${MODEL[@]}" "${TRAINING[@]}" "${UPIPE[@]}" "${DATA[@]}"
    echo
}
"""


def read(folder, name, **environment):
    """The file's size of the job, and its flags for ``fit`` and for training."""
    (folder / "launch.sh").write_text(STUB)
    (folder / "scontrol").write_text(f"#!/bin/sh\necho '   Command={folder}/x.sbatch'\n")
    (folder / "scontrol").chmod(0o755)
    script = SLURM / f"{name}.sbatch"
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "1", **environment}
    out = subprocess.run(["bash", "-eu", script], env=environment, capture_output=True, text=True, check=True).stdout
    fit, training = map(shlex.split, out.splitlines())
    line = next(line for line in script.read_text().splitlines() if "--nodes=" in line)
    asked = dict(word.lstrip("-").split("=") for word in line.split() if "=" in word)
    return int(asked["nodes"]) * int(asked["ntasks-per-node"]), fit, training


@pytest.mark.parametrize("name", FILES)
def test_flags_pass_every_check(tmp_path, installed, name):  # noqa: F811
    from megatron.training.arguments import parse_args

    if BEFORE_019 and "packed" in name:
        pytest.skip("needs 0.19")
    ranks, _, training = read(tmp_path, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["x", *training])
        args = parse_args()
    args.world_size = ranks
    flags.check_flags(args)
    assert args.context_parallel_size == ranks
    if name.endswith("nodes"):
        assert "--fp8-recipe" in read(tmp_path, name, FP8="1")[2] and "--fp8-recipe" not in training


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_it_fits(tmp_path, name):
    ranks, fit, training = read(tmp_path, name)
    command = [sys.executable, "-m", "megatron_upipe.cli", "fit", "--gpus", str(ranks), *fit, "--", *training]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0 and "fits in 80 GiB" in done.stdout, done.stdout + done.stderr
