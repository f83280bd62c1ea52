"""``examples/long_context/``: data of whole documents, and training in stages that grow longer."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.training import MODEL, TRAINING

EXAMPLES = Path(__file__).parents[2] / "examples" / "long_context"


def run(script, *words):
    command = [sys.executable, str(EXAMPLES / script), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def prepare(folder):
    texts = [chr(ord("a") + i % 26) * length for i, length in enumerate((5, 300, 40, 700, 90))]
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[:3]))
    for i, text in enumerate(texts[3:]):
        (folder / f"{i}.txt").write_text(text)
    files = [folder / "lines.jsonl", folder / "0.txt", folder / "1.txt"]
    done = run("prepare.py", "--tokenizer", "bytes", "--out", folder / "data", "--min-tokens", 41, *files)
    assert done.returncode == 0, done.stderr
    return texts, done.stdout


def test_data_are_whole_documents_of_some_length(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    texts, out = prepare(tmp_path)
    assert "4 documents written, 1 shorter than 41 tokens left out" in out and "512 to     1,023" in out
    documents = [bytes(document) for document in IndexedDataset(str(tmp_path / "data"))]
    assert documents == [text.encode() + b"\xff" for text in texts if len(text) >= 40]
    done = run("prepare.py", "--tokenizer", "bytes", "--out", tmp_path / "no", tmp_path / "none.txt")
    assert done.returncode == 2 and "none.txt is no file" in done.stderr


@pytest.mark.slow
def test_stages_grow_and_go_on_from_one_another(tmp_path):
    prepare(tmp_path)
    flags = [*MODEL, *[flag for flag in TRAINING if flag != "--mock-data"], "--train-iters", "2", "--split", "100,0,0"]
    flags += ["--data-path", tmp_path / "data", "--data-cache-path", tmp_path / "cache", "--eval-iters", "0"]
    flags += [
        "--spec",
        "megatron_upipe.layer_specs",
        "upipe_layer_spec",
        "--context-parallel-size",
        "2",
        "--save-interval",
        "9",
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "megatron_upipe.run", *flags]
    stages = ["--original", 32, "--base", 10000, "--head-dim", 6, "--lengths", 64, 128]
    places = ["--load", tmp_path / "base", "--save", tmp_path / "runs", "--"]
    assert "the command has no --train-iters" in run("stages.py", *stages, *places, "true").stderr
    missing = run("stages.py", *stages, *places, *command)
    assert missing.returncode == 2 and "base is no checkpoint" in missing.stderr
    base = [*command, "--seq-length", 32, "--max-position-embeddings", 32, "--save", tmp_path / "base"]
    assert subprocess.run([str(word) for word in base], capture_output=True, check=False, timeout=300).returncode == 0
    early = run("stages.py", *stages, *places, "true", "--train-iters", 2)
    assert early.returncode == 1 and "stage 1 ended at iteration 0 of 2" in early.stderr
    done = run("stages.py", *stages, *places, *command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "stage 2 of 2: 128 tokens, --rotary-base 80000" in done.stdout
    assert "successfully loaded checkpoint from " + str(tmp_path / "runs" / "64-tokens") in done.stdout
    again = run("stages.py", *stages, *places, *command)
    assert again.returncode == 0 and again.stdout.count("complete:") == 2
    shown = run("stages.py", "--print", *stages, *places, *command).stdout.splitlines()
    assert "--rotary-base" in shlex.split(shown[-1]) and len(shown) == 4
