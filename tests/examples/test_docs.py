"""The documents: parts made from the code are current, links lead somewhere, and the code in them runs."""

import importlib.util
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_tables_made_from_the_code_are_current(capsys):
    spec = importlib.util.spec_from_file_location("doc_tables", ROOT / "tools" / "doc_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0, "run .venv/bin/python tools/doc_tables.py"
    table, list_of_refusals = module.flags_table(), module.refusals()
    assert table.count("| `--upipe-") == 14 and "--upipe-heads-per-stage … is not possible" in list_of_refusals


def test_files_that_documents_name_exist():
    folders = ("docs", "megatron_upipe", "examples", "patches", "tools", "tests", "benchmarks")
    ours = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    missing = []
    for document in (ROOT / "README.md", *DOCS.glob("*.md")):
        for name in re.findall(r"`([\w./-]+\.(?:md|py|sh|sbatch|patch))(?:`|::| )", document.read_text()):
            theirs = name.startswith(("pretrain_", "tools/checkpoint/", "megatron/", "gpt_builders"))
            if not theirs and not any(path.endswith("/" + name) for path in ours):
                missing.append((document.name, name))
    assert not missing


def _provided(rank, sizes):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

    parallel = {}
    if sizes is not None:
        p, r = sizes
        parallel = dict(context_parallel_size=p * r, hierarchical_context_parallel_sizes=[p, r])
    parallel_state.initialize_model_parallel(**parallel, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=40,
        num_attention_heads=8,
        num_query_groups=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        transformer_impl="local",
        **parallel,
    )
    namespace = {}
    exec(re.search(r"```python\n(.*?)```", (DOCS / "other_loops.md").read_text(), re.DOTALL)[1], namespace)
    torch.manual_seed(3)
    length = 48
    if sizes is None:
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=64,
            max_sequence_length=length,
            position_embedding_type="rope",
            rotary_base=500000,
        )
    else:
        model = namespace["provide"](config, 64, length)
    tokens = torch.randint(64, (2, length + 1), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "attention_mask": None}
    batch |= {"position_ids": torch.arange(length).expand(2, length).contiguous()}
    if sizes is None:
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    else:
        group = parallel_state.get_context_parallel_group()
        losses = namespace["losses"](model, get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group))
    losses.sum().backward()
    total = losses.detach().sum()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if sizes is not None:  # what finalize_model_grads does
        for tensor in (total, *gradients.values()):
            torch.distributed.all_reduce(tensor)
    return total, gradients


def test_other_training_loops_by_hand(workers):
    """docs/other_loops.md, as it is written there."""
    ((total, gradients),) = workers.run(1, _provided, None)
    for found, theirs in workers.run(4, _provided, (2, 2)):
        assert abs(found - total) <= 1e-5 * abs(total)
        assert set(theirs) == set(gradients)
        for name, wanted in gradients.items():
            assert (theirs[name] - wanted).abs().max() <= 1e-4 * wanted.abs().max(), name
