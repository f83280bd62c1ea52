"""The autograd node: what it stores, when, and how gradients reach the parameters."""

import gc
import weakref

import pytest
import torch
from megatron.core import parallel_state

from megatron_upipe.attention.function import UPipeAttentionFunction
from megatron_upipe.attention.gradients import InputGradient, WeightGradient
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest.parity import (
    Case,
    initialize,
    local,
    rotary_table,
    single_rank_groups,
    stock_attention,
    upipe_attention,
)
from megatron_upipe.planning.live_bytes import LiveBytes
from megatron_upipe.precision.plain import PLAIN

LAYOUT = SequenceLayout(2, 1)


def build(case=None):
    initialize(2, 1)
    case = case or Case()
    module = upipe_attention(case, 2, 1, stock_attention(case, single_rank_groups()))
    length = 2 * LAYOUT.size * case.chunk
    rank = parallel_state.get_context_parallel_rank()
    torch.manual_seed(5)
    x = torch.randn(length // LAYOUT.size, case.micro_batch, case.hidden, dtype=torch.float64)
    return module, x, local(rotary_table(case, length), LAYOUT, rank)


def _grad_modes(rank):
    module, x, table = build()
    wanted = module(x.clone().requires_grad_(), None, rotary_pos_emb=table)[0]
    assert wanted.grad_fn is not None
    stored = {"keep": [], "nothing": []}
    for mode in ("no_grad", "inference_mode", "eval under no_grad"):
        module.train(mode != "eval under no_grad")
        left = []
        for _ in range(4):  # the least: gloo's threads let go of an exchanged tensor a little late now and then
            with torch.inference_mode() if mode == "inference_mode" else torch.no_grad(), LiveBytes() as live:
                y = module(x, None, rotary_pos_emb=table)[0]
            assert y.grad_fn is None and torch.equal(y, wanted.detach())
            gc.collect()
            left.append(live.now - y.nbytes)
        stored["nothing"].append(min(left))
    module.eval()  # evaluation mode alone does not stop gradients
    with LiveBytes() as live:
        y = module(x, None, rotary_pos_emb=table)[0]
    assert y.grad_fn is not None
    stored["keep"].append(live.now - y.nbytes)
    return stored


def test_without_gradients_nothing_is_stored(workers):
    for stored in workers.run(2, _grad_modes):
        assert set(stored["nothing"]) == {0}
        assert stored["keep"][0] > 0


def _frees(rank):
    module, x, table = build()
    y, _ = module(x.requires_grad_(), None, rotary_pos_emb=table)
    kept = weakref.ref(y.grad_fn.saved_tensors[1].untyped_storage())
    y.sum().backward()
    del y
    gc.collect()
    return kept() is None


def test_backward_lets_go_of_the_keep_store(workers):
    assert workers.run(2, _frees) == [True, True]


def _frozen(rank, names):
    module, x, table = build(Case(config=dict(qk_layernorm=True, add_qkv_bias=True)))
    parameters = dict(module.named_parameters())
    y, _ = module(x.requires_grad_(), None, rotary_pos_emb=table)
    y.sum().backward()
    wanted = {name: p.grad for name, p in parameters.items()}
    module.zero_grad(set_to_none=True)
    for name in names:
        parameters[name].requires_grad_(False)
    y, _ = module(x.detach(), None, rotary_pos_emb=table)
    y.sum().backward()
    for name, parameter in parameters.items():
        if name in names:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, wanted[name])
    return len(parameters)


@pytest.mark.parametrize(
    "names",
    [
        ["linear_qkv.weight"],
        ["linear_proj.weight", "q_layernorm.weight"],
        ["linear_qkv.weight", "linear_qkv.bias", "k_layernorm.weight"],
    ],
)
def test_frozen_parameters_get_no_gradient(workers, names):
    assert workers.run(2, _frozen, names) == [5, 5]


def _fused(rank):
    """Two micro-batches with gradient accumulation fusion: main_grad in fp32 has the sum, .grad nothing."""
    module, x, table = build()
    parameters = dict(module.named_parameters())
    for _ in range(2):
        module(x, None, rotary_pos_emb=table)[0].square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in parameters.items()}
    module.zero_grad(set_to_none=True)
    object.__setattr__(module.plan, "fuse_weight_gradients", True)
    for p in parameters.values():
        p.main_grad = torch.zeros(p.shape, dtype=torch.float32)
        p.grad_added_to_main_grad = False
        p.zero_out_wgrad = True
    for _ in range(2):
        module(x, None, rotary_pos_emb=table)[0].square().sum().backward()
    for name, p in parameters.items():
        assert p.grad_added_to_main_grad is True
        assert torch.equal(p.grad, torch.zeros_like(p)), "a placeholder that adds nothing"
        torch.testing.assert_close(p.main_grad, wanted[name].float(), rtol=1e-5, atol=1e-4)
    return True


def test_fused_gradients_go_to_main_grad(workers):
    assert workers.run(2, _fused) == [True, True]


@pytest.mark.parametrize("pieces", [1, 16])
def test_fused_gradients_keep_fp32(pieces):
    """bf16 products are added to main_grad without being rounded to bf16."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(16, 8, dtype=torch.bfloat16))
    parameter.main_grad = torch.zeros(16, 8)
    left, right = torch.randn(64, 16).bfloat16(), torch.randn(64, 8).bfloat16()
    gradient = WeightGradient(parameter, fuse=True)
    for i in range(pieces):
        rows = slice(i * 16 // pieces, (i + 1) * 16 // pieces)
        product = PLAIN.weight_gradient(left[:, rows], right, gradient.dtype)
        gradient.write(lambda w, rows=rows: w[rows], product)
    exact = left.double().t() @ right.double()
    assert (parameter.main_grad - exact).abs().max() < 1e-4 < ((left.t() @ right).double() - exact).abs().max()


def test_sharded_parameters_are_not_fused():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.main_grad, parameter.__fsdp_param__ = torch.zeros(2, 2), True
    gradient = WeightGradient(parameter, fuse=True)
    gradient.write(lambda w: w, torch.ones(2, 2))
    assert torch.equal(gradient.result(), torch.ones(2, 2)) and parameter.main_grad.sum() == 0


def _fusion_without_apex(rank):
    """Megatron's linears refuse the flag without Apex; UPipe's do not need it."""
    initialize(2, 1)
    case = Case(config=dict(gradient_accumulation_fusion=True))
    plain = Case()
    module = upipe_attention(case, 2, 1, stock_attention(plain, single_rank_groups()))
    return module.plan.fuse_weight_gradients and module.config.gradient_accumulation_fusion


def test_fusion_needs_no_apex(workers):
    assert workers.run(2, _fusion_without_apex) == [True, True]


def _recomputed(rank, reentrant):
    from torch.utils.checkpoint import checkpoint

    module, x, table = build()
    results = []
    for wrap in (False, True):
        module.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()

        def call(t):
            return module(t, None, rotary_pos_emb=table)[0]

        y = checkpoint(call, leaf, use_reentrant=reentrant) if wrap else call(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, module.linear_qkv.weight.grad.clone()))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(workers, reentrant):
    assert workers.run(2, _recomputed, reentrant) == [True, True]


def _node(rank, dtype):
    """Arity, saved tensors and gradient dtypes of the autograd node."""
    module, x, table = build(Case(config=dict(qk_layernorm=True, add_qkv_bias=True)))
    module.to(dtype)
    y, _ = module(x.to(dtype).requires_grad_(), None, rotary_pos_emb=table)
    node = y.grad_fn
    assert len(node.saved_tensors) == 2 + len(module.plan.schedule.stages), "x, out and one lse a stage"
    gradients = UPipeAttentionFunction.backward(node, torch.ones_like(y))
    # x, qkv weight and bias, proj weight, no sinks, two norms; the first two arguments are no tensors
    assert len(gradients) == 2 + len(node.next_functions) + 1 == 9
    assert gradients[:2] == (None, None) and gradients[6] is None
    inputs = (x, module.linear_qkv.weight, module.linear_qkv.bias, module.linear_proj.weight)
    norms = (module.q_layernorm.weight, module.k_layernorm.weight)
    assert [tuple(g.shape) for g in gradients[2:] if g is not None] == [tuple(t.shape) for t in (*inputs, *norms)]
    y.backward(torch.ones_like(y))
    return {str(p.grad.dtype) for p in module.parameters()} == {str(dtype)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_autograd_node(workers, dtype):
    assert workers.run(2, _node, dtype) == [True, True]


def _unpacked(rank):
    """How often backward asks for what forward saved: once for each tensor."""
    module, x, table = build()
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    def unpack(tensor):
        unpacked.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y, _ = module(x.requires_grad_(), None, rotary_pos_emb=table)
    assert len(packed) == 2 + len(module.plan.schedule.stages) and not unpacked
    y.backward(torch.ones_like(y))
    return packed == unpacked


def test_saved_tensors_are_unpacked_once(workers):
    assert workers.run(2, _unpacked) == [True, True]


def _bitwise(rank):
    module, x, table = build()
    first = module(x, None, rotary_pos_emb=table)[0]
    first.square().sum().backward()
    gradient = module.linear_qkv.weight.grad.clone()
    module.zero_grad(set_to_none=True)
    second = module(x, None, rotary_pos_emb=table)[0]
    second.square().sum().backward()
    return torch.equal(first, second) and torch.equal(gradient, module.linear_qkv.weight.grad)


def test_repeats_bit_for_bit(workers):
    assert workers.run(2, _bitwise) == [True, True]


def _unlimited(rank):
    """A window of -1 is none, as in TransformerEngine; Megatron's own core attention would then mask everything."""
    module, x, table = build(Case(config=dict(window_size=(-1, 0))))
    parallel_state.destroy_model_parallel()
    plain, _, _ = build()
    plain.load_state_dict(module.state_dict())
    found, wanted = (m(x, None, rotary_pos_emb=table)[0] for m in (module, plain))
    return module.plan.window is None and torch.equal(found, wanted)


def test_a_window_without_end(workers):
    assert workers.run(2, _unlimited) == [True, True]


def test_sinks_are_marked_as_split_over_tensor_parallelism(workers):
    """Without the mark, as in Megatron, the gradient norm leaves out the heads of all but the first rank."""
    assert workers.run(2, _marked) == [(False, True)] * 2


def _marked(rank):
    initialize(1, 2)
    case = Case(config=dict(softmax_type="learnable"))
    stock = stock_attention(case, single_rank_groups())
    upipe = upipe_attention(case, 1, 2, stock)
    sinks = [module.core_attention.softmax_offset for module in (stock, upipe)]
    return tuple(getattr(offset, "tensor_model_parallel", False) for offset in sinks)


def _refusals(rank):
    module, x, table = build()
    messages = {}
    given = {
        "mask": dict(attention_mask=torch.ones(1)),
        "attention_bias": dict(attention_bias=torch.ones(1)),
        "key_value_states": dict(key_value_states=x),
        "sequence_len_offset": dict(sequence_len_offset=3),
        "inference": dict(inference_context=object()),
    }
    for name, arguments in given.items():
        with pytest.raises(UPipeError) as refused:
            module(x, **{"attention_mask": None, **arguments}, rotary_pos_emb=table)
        messages[name] = str(refused.value)
    handle = module.linear_qkv.register_forward_hook(lambda *a: None)
    with pytest.raises(UPipeError) as refused:
        module(x, None, rotary_pos_emb=table)
    messages["hook"] = str(refused.value)
    handle.remove()
    wrapped, module.linear_proj = module.linear_proj, torch.nn.Linear(2, 2)
    with pytest.raises(UPipeError) as refused:
        module(x, None, rotary_pos_emb=table)
    messages["wrapped"] = str(refused.value)
    module.linear_proj = wrapped
    module(x, None, rotary_pos_emb=table)  # the twin: nothing is left of it
    return messages


def test_refuses_at_run_time(workers):
    messages = workers.run(2, _refusals)[0]
    assert "--no-create-attention-mask-in-dataloader" in messages["mask"]
    for name in ("attention_bias", "key_value_states", "sequence_len_offset"):
        assert messages[name] == f"{name} is not supported by UPipe with context parallelism; pass None"
    assert "generate with the stock spec, from the same checkpoint" in messages["inference"]
    assert messages["hook"].startswith("linear_qkv is wrapped, hooked or its weight is computed")
    assert "linear_proj" in messages["wrapped"] and "(Linear)" in messages["wrapped"]


def _one_rank(rank):
    """P*R = 1 goes to the stock path, masks and all."""
    parallel_state.initialize_model_parallel()
    case = Case()
    stock = stock_attention(case, single_rank_groups())
    module = upipe_attention(case, 1, 1, stock)
    x = torch.randn(6, 3, case.hidden, dtype=torch.float64)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    assert module.describe() == "one context-parallel rank: Megatron's own attention, rope stock"
    return torch.equal(module(x, mask)[0], stock(x, mask)[0])


def test_one_context_parallel_rank_is_stock(workers):
    assert workers.run(1, _one_rank) == [True]


@pytest.mark.parametrize(("additions", "dtype"), [(8, torch.bfloat16), (9, torch.float32)])
def test_input_gradient_precision(additions, dtype):
    x = torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    total = InputGradient(x, additions, PLAIN)
    assert total._sum.dtype == dtype
    rows = torch.randn(5, 4).bfloat16()
    gradient = torch.randn(6, 5).bfloat16()
    total.add(slice(None), gradient, rows)
    assert total.result().dtype == dtype
    torch.testing.assert_close(total.result().flatten(0, 1).bfloat16(), gradient @ rows, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("additions", [8, 64])
def test_input_gradient_does_not_round_at_every_stage(additions):
    """Of equal parts, the sum errs by no more than it does with 8 of them in bf16."""
    torch.manual_seed(0)
    x = torch.zeros(300, 1, 16, dtype=torch.bfloat16)
    parts = [(torch.randn(300, 8).bfloat16(), torch.randn(8, 16).bfloat16()) for _ in range(additions)]
    total, exact = InputGradient(x, additions, PLAIN), sum(g.double() @ r.double() for g, r in parts)
    for gradient, rows in parts:
        total.add(slice(None), gradient, rows)
    error = (total.result().flatten(0, 1).bfloat16().double() - exact).norm() / exact.norm()
    assert error < 0.004  # one rounding to bf16 is 0.0017; 64 roundings in bf16 would be 0.01


def test_weight_gradient_pieces():
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    gradient = WeightGradient(parameter, fuse=True)  # without main_grad there is nothing to fuse into
    gradient.write(lambda w: w[::2], torch.ones(2, 3))
    gradient.write(lambda w: w[1::2], torch.full((6,), 2.0))
    assert torch.equal(gradient.result(), torch.tensor([[1.0] * 3, [2.0] * 3] * 2))


def _backend(rank, name):
    module, x, table = build(Case(upipe=dict(attention_backend=name)))
    y, _ = module(x, None, rotary_pos_emb=table)
    return module.plan.kernel.name, y.detach()


def test_the_backend_asked_for(workers):
    """The first call chooses it, from what its input is."""
    found = [workers.run(2, _backend, name) for name in ("auto", "reference")]
    for (auto, y), (reference, same) in zip(*found, strict=True):
        assert (auto, reference) == ("torch-cpu", "reference")
        torch.testing.assert_close(y, same, rtol=1e-12, atol=1e-12)
