"""Training on packed documents: the stock run's losses, in both of Megatron's layouts, with windows and sinks."""

import json
import os
import random
from pathlib import Path

import numpy
import pytest
import torch
from end_to_end.test_upipe_training import CP2, FSDP, NORM_TOLERANCE, TOLERANCE, USP, assert_close
from end_to_end.training import some_slow, train
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron_version import BEFORE_019, since_019

VOCABULARY = 256
MASKED = [] if BEFORE_019 else ["--dataloader-inter-document-masking"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
GPT_OSS = ["--softmax-type", "learnable", "--window-size", "(13, 0)", "--window-attn-skip-freq", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def documents(folder):
    """Flags for a dataset of documents of 1 to 60 tokens, in sequences of 96."""
    rng = random.Random(0)
    path = folder / "documents"
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=numpy.int32)
    for _ in range(400):
        document = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 60))]
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{path}.idx")
    return ["--data-path", str(path), "--split", "90,5,5"]


@pytest.fixture(scope="module")
def stock(folder, documents):
    """The stock spec on one rank; documents are attended one by one."""
    return train(folder, "stock", 1, *MASKED, *documents, mock_data=False)


LAYOUTS = {
    "P 2 x R 2": USP,
    "exact rope, host store": [*CP2, "--upipe-rope", "exact", "--upipe-offload", "host", "--upipe-keep-attention", "1"],
    "TP 2 + sequence parallel": [*CP2, *TP2],
}


@since_019
@pytest.mark.parametrize("name", some_slow(LAYOUTS, "exact rope, host store", "TP 2 + sequence parallel"))
def test_inter_document_masking_trains_as_stock_does(folder, documents, stock, name):
    ranks = 2 if name.startswith("exact") else 4
    assert_close(train(folder, name, ranks, *MASKED, *documents, *LAYOUTS[name], mock_data=False), stock)


@since_019
def test_documents_matter(folder, documents, stock):
    """The same data as one document is another training."""
    whole = train(folder, "whole", 1, *documents, mock_data=False)
    assert abs(whole["grad norm 1"] / stock["grad norm 1"] - 1) > 10 * NORM_TOLERANCE


@since_019
@pytest.mark.slow
def test_every_pipeline_stage_knows_the_documents(folder, documents):
    flags = [*MASKED, *documents, "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
    wanted = train(folder, "stock pipeline", 2, *flags, mock_data=False)
    assert_close(train(folder, "pipeline", 4, *flags, *CP2, mock_data=False), wanted)


@pytest.mark.slow
def test_windows_and_sinks_train_as_stock_does(folder, documents):
    """Layers in turn with and without a window, learned sinks."""
    flags = [*MASKED, *documents, *GPT_OSS]
    wanted = train(folder, "stock sinks", 1, *flags, mock_data=False)
    assert_close(train(folder, "sinks", 4, *flags, *USP, mock_data=False), wanted)


@pytest.mark.slow
def test_the_gradient_norm_does_not_depend_on_tensor_parallelism(folder, documents):
    """From Megatron's checkpoint of sinks, since with tensor parallelism it draws other first values."""
    saved, flags = str(folder / "sinks"), [*MASKED, *documents, *GPT_OSS]
    train(folder, "stock saves", 1, *flags, "--save", saved, "--save-interval", "2", mock_data=False)
    Path(saved, "latest_checkpointed_iteration.txt").write_text("2")
    load = ["--load", saved, "--no-load-rng", "--dist-ckpt-optim-fully-reshardable", "--no-load-optim"]
    one = train(folder, "loaded", 2, *flags, *CP2, *load, mock_data=False)
    two = train(folder, "loaded with TP 2", 4, *flags, *CP2, *TP2, *load, mock_data=False)
    assert "grad norm 3" in one
    assert_close(two, one)


@pytest.mark.slow
def test_windows_and_sinks_under_megatron_fsdp(folder, documents):
    flags = [*MASKED, *documents, *GPT_OSS]
    wanted = train(folder, "stock for fsdp", 1, *flags, mock_data=False)
    flags += [*CP2, *FSDP, "--upipe-offload", "host", "--upipe-keep-attention", "1"]
    assert_close(train(folder, "fsdp", 4, *flags, distributed_optimizer=False, mock_data=False), wanted)


# Megatron's SFT reads conversations by Hugging Face's ``datasets`` and tokenizers; these stand in for them.
SFT_ENTRY = """
import json, os, runpy, sys, types
import torch
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
    tokens = [[int(word) for word in turn["content"].split()] for turn in conversation]
    targets = [
        turn if message["role"] == "assistant" else [-100] * len(turn)
        for turn, message in zip(tokens, conversation)
    ]
    return tuple(torch.tensor(sum(lists, [])) for lists in (tokens, targets))

MegatronTokenizerText.tokenize_conversation = tokenize_conversation
MegatronTokenizerText.pad = property(lambda self: 0)
sys.modules["datasets"] = types.ModuleType("datasets")
sys.modules["datasets"].load_dataset = lambda kind, data_files, split: [
    json.loads(line) for line in open(data_files)
]
if os.environ.get("SFT_SCRIPT"):
    sys.path.insert(0, os.path.dirname(os.environ["SFT_SCRIPT"]))
    runpy.run_path(os.environ["SFT_SCRIPT"], run_name="__main__")
else:
    from megatron_upipe.integration import gpt_entry
    gpt_entry.main()
"""


@pytest.fixture(scope="module")
def conversations(folder):
    """Flags for packs of short conversations, and the script that reads them."""
    rng = random.Random(1)
    lines = []
    for _ in range(200):
        messages = []
        for _ in range(3):
            for role, most in (("system", 4), ("user", 9), ("assistant", 12)):
                words = [str(rng.randrange(1, VOCABULARY)) for _ in range(rng.randint(1, most))]
                messages.append({"role": role, "content": " ".join(words)})
        lines.append(json.dumps({"messages": messages}))
    path, script = folder / "conversations.jsonl", folder / "sft_entry.py"
    path.write_text("\n".join(lines))
    script.write_text(SFT_ENTRY)
    flags = ["--sft", "--data-path", str(path), "--split", "90,5,5", "--calculate-per-token-loss"]
    flags += ["--micro-batch-size", "1"] if BEFORE_019 else []
    return [*flags, "--no-create-attention-mask-in-dataloader"], str(script)


@pytest.mark.slow
def test_sft_trains_as_stock_does(folder, conversations):
    """Conversations are padded for the ranks that share them, and each lies in a zigzag of its own."""
    flags, script = conversations
    wanted = train(folder, "stock sft", 1, *flags, script=script, mock_data=False)
    found = train(folder, "sft", 4, *flags, *USP, script=script, mock_data=False)
    assert_close(training_only(found), wanted)
    # Megatron's validation under --sft averages the ranks' means, as if context-parallel ranks had data of their own
    assert abs(found["validation lm loss 5"] / wanted["validation lm loss 5"] - 1) > 10 * TOLERANCE
    checkout = os.environ.get("MEGATRON_LM")
    if checkout:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SFT_SCRIPT", str(Path(checkout, "pretrain_gpt.py")))
            found = train(folder, "sft checkout", 4, *flags, *USP, script=script, mock_data=False)
        assert_close(training_only(found), wanted)


def training_only(losses):
    return {key: value for key, value in losses.items() if key.startswith(("lm loss", "grad norm"))}


def test_unmodified_pretrain_gpt_masks_between_documents(folder, documents, stock):
    checkout = os.environ.get("MEGATRON_LM")
    if not checkout:
        pytest.skip("MEGATRON_LM does not name a Megatron-LM checkout (tag core_v0.19.0)")
    script = Path(checkout, "pretrain_gpt.py")
    if "inter_document_masking" not in script.read_text():
        pytest.skip("0.18 does not mask between documents")
    assert_close(train(folder, "checkout", 4, *MASKED, *documents, *USP, script=str(script), mock_data=False), stock)
