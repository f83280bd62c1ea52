"""The tiled loss against Megatron's vocab-parallel cross entropy, over tensor parallelism."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_upipe.config import UPipeConfig
from megatron_upipe.layers.output import tiled_losses

TOKENS, BATCH, HIDDEN, VOCABULARY = 12, 3, 10, 28
BACKWARDS = 2  # micro-batches


def _compare(rank, tp, sequence_parallel, tied, tile, labels_of, scale):
    """Largest relative error of losses, dhidden and the weight's gradient."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        kv_channels=4,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    config.upipe = UPipeConfig(loss_tile_tokens=tile)
    layer = ColumnParallelLinear(
        HIDDEN,
        VOCABULARY,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        skip_weight_param_allocation=tied,
    )
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    torch.manual_seed(2)
    whole = torch.randn(VOCABULARY, HIDDEN)
    weight = torch.nn.Parameter(whole.chunk(tp)[tp_rank].clone()) if tied else layer.weight
    weight.data.copy_(whole.chunk(tp)[tp_rank])
    hidden = torch.randn(TOKENS, BATCH, HIDDEN)
    labels = torch.randint(VOCABULARY, (BATCH, TOKENS))
    mask = (torch.rand(BATCH, TOKENS) > 0.4).float()
    if labels_of == "ignored":
        labels[mask == 0] = -100
    elif labels_of == "all ignored":
        labels[:], mask[:] = -100, 0
    shard = hidden.chunk(tp)[tp_rank] if sequence_parallel else hidden

    def stock(leaf):
        logits, _ = layer(leaf, weight=weight if tied else None)
        return vocab_parallel_cross_entropy(logits * scale, labels.t().contiguous()).t()

    def ours(leaf):
        return tiled_losses(
            hidden_states=leaf,
            output_layer=layer,
            output_weight=weight if tied else None,
            labels=labels,
            scale_logits=lambda t: t * scale,
            config=config,
            loss_mask=None,
        )

    found = []
    for function in (stock, ours):
        weight.grad = None
        leaf = shard.clone().requires_grad_()
        for _ in range(BACKWARDS):
            losses = function(leaf)
            assert losses.shape == (BATCH, TOKENS)
            (losses * mask).sum().backward()
        found.append((losses.detach(), leaf.grad, weight.grad))
    with torch.no_grad():
        assert torch.equal(ours(shard), found[1][0])
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-6)).item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("tile", [1, 14, 4096])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "tied"),
    [(1, False, False), (2, False, False), (2, True, False), (4, True, True), (2, False, True), (1, False, True)],
)
def test_equals_megatron(workers, tp, sequence_parallel, tied, tile):
    for error in workers.run(tp, _compare, tp, sequence_parallel, tied, tile, "all", 1.0):
        assert error < 2e-6


@pytest.mark.parametrize("labels", ["ignored", "all ignored"])
@pytest.mark.parametrize("tp", [1, 2])
def test_ignored_labels(workers, labels, tp):
    """-100 under the loss mask: finite losses, and gradients of the others only."""
    for error in workers.run(tp, _compare, tp, tp > 1, False, 14, labels, 1.0):
        assert error < 2e-6


def test_scaled_logits(workers):
    for error in workers.run(2, _compare, 2, True, False, 14, "all", 0.37):
        assert error < 2e-6


def _without_table(rank, rope, inference):
    """Bytes that the RoPE module makes in a forward pass of the model, in those of a whole table."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_upipe.config import RotarySettings
    from megatron_upipe.integration import language_models
    from megatron_upipe.integration.symbols import registry
    from megatron_upipe.layer_specs import upipe_layer_spec

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        context_parallel_size=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        transformer_impl="local",
    )
    config.upipe = UPipeConfig(rope=rope, rotary=RotarySettings())
    registry.install("test", language_models.replacements())
    try:
        model = GPTModel(
            config=config,
            transformer_layer_spec=upipe_layer_spec,
            vocab_size=16,
            max_sequence_length=64,
            position_embedding_type="rope",
        )
        context = SimpleNamespace(is_static_batching=lambda: True, max_sequence_length=64) if inference else None
        rotary = model.rotary_pos_emb
        length = rotary.get_rotary_seq_len(context, model.decoder, torch.zeros(32, 1, 8), config, None)
        table = rotary(length)
        tokens = torch.zeros(1, 32, dtype=torch.long)
        losses = model(tokens, tokens, None, labels=tokens)
        node = losses.grad_fn
        while "TiledLoss" not in node.name():
            node = node.next_functions[0][0]  # transposes
        assert losses.shape == (1, 32)
        assert model(tokens, tokens, None).shape == (1, 32, 16), "logits without labels"
        assert "rotary_pos_emb" not in " ".join(model.state_dict())
    finally:
        registry.undo("test")
    return table.numel()


@pytest.mark.parametrize(
    ("rope", "inference", "numbers"), [("exact", False, 0), ("stock", False, 32 * 4), ("exact", True, 64 * 4)]
)
def test_no_rope_table_where_angles_are_exact(workers, rope, inference, numbers):
    assert workers.run(2, _without_table, rope, inference) == [numbers, numbers]
