"""``examples/hugging_face/``: a tiny random model to Megatron, through UPipe training, and back."""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.training import TRAINING, launch

CONVERT = Path(__file__).parents[2] / "examples" / "hugging_face" / "convert.py"
SIZES = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
MODELS = {
    "llama": ("Llama", dict(rope_parameters={"rope_type": "default", "rope_theta": 50000.0})),
    "qwen2": ("Qwen2", {}),  # biases
    "qwen3": ("Qwen3", dict(head_dim=10, tie_word_embeddings=True)),  # QK norm
}


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not here; make test-examples has it"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hugging_face")


def convert(*words, status=0):
    command = [sys.executable, "-W", "ignore", str(CONVERT), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "RANK": "0"})
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def make(folder, name):
    """A random model as Hugging Face saves it, norms and biases not ones and zeros."""
    import torch
    import transformers

    kind, others = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(vocab_size=250, max_position_embeddings=256, **SIZES, **others)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    model.save_pretrained(folder / name)
    return folder / name


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_there_training_and_back(folder, name):
    theirs, ours, back = make(folder, name), folder / f"{name} megatron", folder / f"{name} back"
    out = convert("to-megatron", theirs, ours, "--dtype", "fp32")
    flags = shlex.split(out.split("--finetune and")[1].strip().splitlines()[0])
    convert("compare", ours, theirs)
    convert("to-hugging-face", ours, theirs, back, "--dtype", "fp32")
    assert (back / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()

    saved = folder / f"{name} trained"
    flags += [*TRAINING, "--seq-length", "96", "--max-position-embeddings", "96", "--vocab-size", "250"]
    flags += ["--context-parallel-size", "2", "--spec", "megatron_upipe.layer_specs", "upipe_layer_spec"]
    flags += [
        "--load",
        str(ours),
        "--finetune",
        "--save",
        str(saved),
        "--save-interval",
        "9",
        "--data-cache-path",
        str(folder / "cache"),
    ]
    done = launch(2, *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    trained = folder / f"{name} trained back"
    convert("to-hugging-face", saved, theirs, trained, "--dtype", "fp32")
    assert "largest difference" in convert("compare", saved, trained)
    convert("compare", saved, theirs, status=1)  # the training has changed it


@needs_transformers
def test_weights_that_would_be_lost_are_refused(folder):
    from safetensors.torch import load_file, save_file

    theirs = make(folder, "qwen3")
    weights = load_file(theirs / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = weights["model.norm.weight"].clone()
    save_file(weights, theirs / "model.safetensors", {"format": "pt"})
    out = convert("to-megatron", theirs, folder / "lost", status=1)
    assert "has weights that this example does not know: model.layers.0.self_attn.q_proj.bias" in out


def test_other_models_are_refused(folder):
    other = folder / "gpt2"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    assert "is a gpt2; this example converts llama, mistral, qwen2, qwen3" in convert(
        "to-megatron", other, folder / "nothing", status=1
    )
