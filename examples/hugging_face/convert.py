#!/usr/bin/env python3
"""Weights from Hugging Face to a Megatron-LM checkpoint and back, on CPUs; for Llama, Mistral, Qwen2 and Qwen3.

    python examples/hugging_face/convert.py to-megatron  HF_FOLDER CHECKPOINT    # prints the flags to train with
    python examples/hugging_face/convert.py to-hugging-face CHECKPOINT HF_FOLDER NEW_FOLDER
    python examples/hugging_face/convert.py compare CHECKPOINT HF_FOLDER         # logits of both, on random tokens

The checkpoint is in torch_dist format: it loads at any parallelism, with UPipe's spec and with the stock ones
(--load CHECKPOINT --finetune), but not under Megatron-FSDP (docs/quick_start.md). For other models: Megatron-Bridge.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from model_flags import model_flags, padded_vocabulary, read_config, shape_of
from weights import to_hugging_face, to_megatron

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, places in (
        ("to-megatron", ("hugging_face", "checkpoint")),
        ("to-hugging-face", ("checkpoint", "hugging_face", "new_folder")),
        ("compare", ("checkpoint", "hugging_face")),
    ):
        command = commands.add_parser(name)
        for place in places:
            command.add_argument(place, type=Path)
        command.add_argument("--dtype", choices=DTYPES, default="fp32" if name == "compare" else "bf16")
    given = parser.parse_args()
    config = read_config(given.hugging_face)
    check_places(given)
    model = build(config, given.dtype)
    if given.command == "to-megatron":
        import_weights(model, given.hugging_face, config, given.checkpoint)
        print("train with --load", given.checkpoint, "--finetune and\n ", shlex.join(model_flags(config)))
        return 0
    load(model, given.checkpoint)
    if given.command == "to-hugging-face":
        export_weights(model, given.hugging_face, config, given.new_folder)
        return 0
    return compare(model, given.hugging_face, config)


def check_places(given: argparse.Namespace) -> None:
    """Before minutes of reading. Raises SystemExit."""
    new = given.checkpoint / "release" if given.command == "to-megatron" else getattr(given, "new_folder", None)
    if new is not None and new.exists():
        raise SystemExit(f"{new} exists already; name another folder")
    if given.command != "to-megatron" and not (given.checkpoint / "latest_checkpointed_iteration.txt").exists():
        raise SystemExit(f"{given.checkpoint} is no Megatron-LM checkpoint: no latest_checkpointed_iteration.txt")


def build(config: dict[str, Any], dtype: str) -> torch.nn.Module:
    """Megatron's GPTModel in this process alone."""
    from megatron_upipe.integration import launcher

    launcher.install(force_cpu=True)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    sys.argv = [sys.argv[0], *model_flags(config), "--seq-length", "128", "--max-position-embeddings", "128"]
    sys.argv += ["--micro-batch-size", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1"]
    sys.argv += ["--bf16"] if dtype == "bf16" else []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with redirect_stdout(StringIO()):  # a thousand flags
        args = parse_and_validate_args()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    settings = core_transformer_config_from_args(args)
    settings.perform_initialization = False  # every weight is read
    return GPTModel(
        config=settings,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=settings.qk_layernorm, normalization=settings.normalization
        ),
        vocab_size=padded_vocabulary(config),
        max_sequence_length=128,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
    ).to(DTYPES[dtype])


def import_weights(model: torch.nn.Module, folder: Path, config: dict[str, Any], checkpoint: Path) -> None:
    """Reads all of them, and writes a checkpoint as Megatron-LM does for releases."""
    from megatron.core import dist_checkpointing

    parameters = dict(model.named_parameters())
    read, unread = _reader(folder)
    with torch.no_grad():
        for name, value in _shown(to_megatron(read, shape_of(config), padded_vocabulary(config)), len(parameters)):
            parameters.pop(name).copy_(value)
    if parameters:
        raise SystemExit(f"{folder} has no weights for {', '.join(parameters)}")
    left = {name for name in unread if not name.endswith("rotary_emb.inv_freq")} - {"lm_head.weight"}  # made, or tied
    if left:
        raise SystemExit(f"{folder} has weights that this example does not know: {', '.join(sorted(left)[:3])} ...")
    target = checkpoint / "release"
    target.mkdir(parents=True)
    state = {"model": model.sharded_state_dict(), "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save(state, str(target))
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("release")


def load(model: torch.nn.Module, checkpoint: Path) -> None:
    """The latest one of a Megatron-LM checkpoint folder (torch_dist)."""
    from megatron.core import dist_checkpointing

    latest = (checkpoint / "latest_checkpointed_iteration.txt").read_text().strip()
    name = latest if latest == "release" else f"iter_{int(latest):07d}"
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint / name))
    model.load_state_dict(state["model"])


def export_weights(model: torch.nn.Module, old: Path, config: dict[str, Any], new: Path) -> None:
    """Weights under Hugging Face's names, with all other files of ``old``."""
    from huggingface_hub import save_torch_state_dict

    parameters = dict(model.named_parameters())
    shape = shape_of(config)
    pairs = to_hugging_face(lambda name: parameters[name].detach(), shape)
    state = {name: value.clone() for name, value in _shown(pairs, 9 * shape.layers + 3)}
    new.mkdir(parents=True)
    save_torch_state_dict(state, new)
    for path in old.iterdir():
        if path.is_file() and ".safetensors" not in path.name and not path.name.endswith(".bin"):
            shutil.copy(path, new)


def compare(model: torch.nn.Module, folder: Path, config: dict[str, Any]) -> int:
    """Prints the largest difference of logits; 1 if it is not that of rounding."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(config["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=next(model.parameters()).dtype).eval()
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        wanted = theirs(tokens).logits
        found = model.eval()(tokens, torch.arange(length).expand_as(tokens), mask)[..., : config["vocab_size"]]
    difference = ((found - wanted).abs().max() / wanted.abs().max()).item()
    least = 1e-4 if wanted.dtype == torch.float32 else 5e-2
    print(f"largest difference of logits, relative to the largest: {difference:.1e} (at most {least:.0e})")
    return 0 if difference <= least else 1


def _reader(folder: Path) -> tuple[Callable[[str], torch.Tensor], set[str]]:
    """name -> tensor, from safetensors files one tensor at a time; and the names that have not been read."""
    from safetensors import safe_open

    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise SystemExit(f"{folder} has no .safetensors files; save the model with safe_serialization")
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    unread = set(places)

    def read(name: str) -> torch.Tensor:
        if name not in places:
            raise SystemExit(f"{folder} has no {name}")
        unread.discard(name)
        return places[name].get_tensor(name)

    return read, unread


def _shown(pairs: Iterable[tuple[str, Any]], total: int) -> Iterator[tuple[str, Any]]:
    """Prints how far it is, every two seconds."""
    last = time.monotonic()
    for count, pair in enumerate(pairs):
        if time.monotonic() - last > 2:
            last = time.monotonic()
            print(f"  {count} of about {total} weights: {pair[0]}", file=sys.stderr, flush=True)
        yield pair


if __name__ == "__main__":
    sys.exit(main())
