"""The layer's autograd node: what waits, how often things are computed, what a user may do with it."""

import gc
import time

import pytest
import torch
from layers.stack import HOST, LAYERS, build, run

from megatron_upipe.attention import backward, forward
from megatron_upipe.integration.selftest.layers import SWIGLU
from megatron_upipe.integration.selftest.packed import Packing
from megatron_upipe.integration.selftest.parity import Case, rotary_table
from megatron_upipe.layers import function, transformer_layer
from megatron_upipe.memory.host_store import host_store
from megatron_upipe.planning.live_bytes import LiveBytes

IN_BOTH = ("project_queries", "project_keys_values", "start_to_heads", "start_to_sequence")


class Counts(dict):
    """How often functions ran in either pass, and exchanges by direction."""

    def __init__(self, monkeypatch):
        super().__init__()
        for module, name in (
            (function, "attention_forward"),
            (function, "attention_backward"),
            (forward, "ring_forward"),
            *((pass_, name) for pass_ in (forward, backward) for name in IN_BOTH),
        ):
            self._count(monkeypatch, module, name)

    def _count(self, monkeypatch, module, name):
        original = getattr(module, name)
        self.setdefault(name, 0)

        def counted(*args, **kwargs):
            self[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)


POLICIES = [
    (dict(), LAYERS),
    (dict(keep_attention=0), 2 * LAYERS),
    (dict(keep_attention=1), 2 * LAYERS - 1),
    (dict(checkpoint_every=2), LAYERS),
    (dict(checkpoint_every=2, keep_attention=0), 2 * LAYERS),
    (dict(checkpoint_every=3, keep_attention=0), 2 * LAYERS),
    (dict(checkpoint_every=4, keep_attention=0, **HOST), 2 * LAYERS),
    (dict(**HOST), LAYERS),
]


def _counted(rank, upipe):
    layers, x, table = build(**upipe)
    with pytest.MonkeyPatch.context() as patch:
        counts = Counts(patch)
        run(layers, x.requires_grad_(), table).sum().backward()
    schedule = layers[0].self_attention.plan.schedule
    return dict(counts), len(schedule.stages), sum(stage.begins_block for stage in schedule.stages)


@pytest.mark.parametrize(("upipe", "forwards"), POLICIES)
def test_how_often_things_are_computed(workers, upipe, forwards):
    """Documented in docs/memory.md: attention forward once a layer with keep, twice with input."""
    for counts, stages, blocks in workers.run(2, _counted, upipe):
        passes = forwards + LAYERS  # each projects and exchanges q, k and v; backward makes them again
        assert counts == {
            "attention_forward": forwards,
            "attention_backward": LAYERS,
            "ring_forward": forwards * stages,
            "project_queries": passes * stages,
            "project_keys_values": passes * blocks,
            "start_to_heads": passes * stages,  # q, with k and v; in backward also dout
            "start_to_sequence": passes * stages,  # out; or dq, with dk and dv
        }


def _gradients(rank, policies):
    found = []
    for upipe in policies:
        layers, x, table = build(**upipe)
        x.requires_grad_()
        (run(layers, x, table) * torch.arange(x.shape[-1])).sum().backward()
        found.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
        assert host_store(x.device).in_use == 0
    return [all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)) for other in found]


def test_policies_agree_bit_for_bit(workers):
    policies = [upipe for upipe, _ in POLICIES] + [dict(prefetch="on", **HOST)]
    for equal in workers.run(2, _gradients, policies):
        assert equal == [True] * len(policies)


PACKING = Packing((11, 2, 7), (12, 4, 8), 24, "document")


def _packed_gradients(rank, policies):
    """As ``_gradients``, of packed documents in layers with a window and sinks; a new batch of parameters each time."""
    found = []
    for upipe in policies:
        config = {**SWIGLU, "window_size": (5, 0), "softmax_type": "learnable"}
        case = Case(config=config, micro_batch=1, chunk=6, upipe={"mlp_tile_tokens": 5, **upipe})
        layers, x, _ = build(case)
        x.requires_grad_()
        y = run(layers, x, rotary_table(case, 12), PACKING.parameters())
        (y * torch.arange(x.shape[-1])).sum().backward()
        gradients = {name: p.grad for layer in layers for name, p in layer.named_parameters()}
        assert gradients["self_attention.core_attention.softmax_offset"].abs().max() > 0
        found.append([y.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())])
    return [all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)) for other in found]


def test_policies_agree_bit_for_bit_on_packed_documents(workers):
    policies = [dict(), dict(keep_attention=0), dict(checkpoint_every=3, keep_attention=1, **HOST)]
    assert workers.run(2, _packed_gradients, policies) == [[True] * 3] * 2


def _no_slot_in_use(rank):
    layers, x, table = build(**HOST)
    store = host_store(x.device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = run(layers, x, table)
        assert store.in_use == 0 and y.grad_fn is None
    for layer in layers:
        layer.eval()
    y = run(layers, x, table)
    assert store.in_use > 0 and y.grad_fn is not None, "evaluation mode alone does not stop gradients"
    del y
    gc.collect()
    assert store.in_use == 0, "a graph that is dropped"

    def fails(*args, **kwargs):
        raise ArithmeticError("planted")

    for place, name in ((function, "attention_forward"), (function, "attention_backward")):
        for after in (0, 1, 3):
            left = [after]
            original = getattr(place, name)

            def sometimes(*args, original=original, left=left, **kwargs):
                left[0] -= 1
                return original(*args, **kwargs) if left[0] >= 0 else fails()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(place, name, sometimes)
                with pytest.raises(ArithmeticError, match="planted"):
                    run(layers, x.requires_grad_(), table).sum().backward()
            gc.collect()
            assert store.in_use == 0, (name, after)
    run(layers, x, table).sum().backward()  # the next step is as good as ever
    return store.in_use


def test_evaluation_and_exceptions_leave_no_slot_in_use(workers):
    assert workers.run(2, _no_slot_in_use) == [0, 0]


def _shared_gradient(rank):
    """A gradient that others hold is not written to."""
    layers, x, table = build()
    x.requires_grad_()
    other = torch.zeros_like(x, requires_grad=True)
    hooked, given = [], torch.ones_like(x)
    y = run(layers, x, table)
    y.register_hook(hooked.append)
    (y + other).backward(given)
    assert torch.equal(given, torch.ones_like(x)) and torch.equal(hooked[0], given) and torch.equal(other.grad, given)
    return x.grad.clone()


def _alone(rank):
    layers, x, table = build()
    x.requires_grad_()
    writes = []
    original = transformer_layer.DenseBackward.tile

    def tile(self, hidden, dy):
        writes.append(dy.data_ptr())
        return original(self, hidden, dy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_layer.DenseBackward, "tile", tile)
        seen = []
        y = run(layers, x, table)
        # the sum's gradient is expanded; its product with ones belongs to the last layer alone
        scaled = y * torch.ones_like(y)
        scaled.register_hook(lambda g: seen.append(g.data_ptr()))
        scaled.sum().backward()
    return len(set(writes)), x.grad.clone()


def test_incoming_gradients_of_others_are_not_changed(workers):
    shared = workers.run(2, _shared_gradient)
    alone = workers.run(2, _alone)
    for gradient, (_, same) in zip(shared, alone, strict=True):
        assert torch.equal(gradient, same)


def _held(rank):
    from megatron_upipe.layers.holding import held_alone, holders

    found = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            found.append(held_alone() == holders(dy))
            return dy.clone()

    def backward(after):
        found.clear()
        x = torch.randn(3, requires_grad=True)
        after(Probe.apply(x)).sum().backward()
        return list(found)

    kept = []

    def hooked(y):
        y.register_hook(lambda g: kept.append(g.view(3)))
        return y * 2

    return {
        "alone": backward(lambda y: y * 2),
        "two consumers": backward(lambda y: y * 2 + y * 3),
        "shared by two nodes": backward(lambda y: (y + Probe.apply(torch.zeros(3, requires_grad=True))) * 2),
        "kept by a hook": backward(hooked),
    }


def test_who_holds_a_gradient(workers):
    found = workers.run(1, _held)[0]
    assert found == {
        "alone": [True],
        "two consumers": [True],  # autograd has added them up
        "shared by two nodes": [False, True],  # the second one runs when the first is done
        "kept by a hook": [False],
    }


def _misuse(rank):
    messages = []
    layers, x, table = build()
    x.requires_grad_()
    y = run(layers[:1], x, table).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as error:
        y.backward()
    messages.append(str(error.value))
    leaf = x.detach().clone()
    y = run(layers[:1], leaf.requires_grad_(), table).sum()
    leaf.data.add_(1)  # not seen by autograd's version counter
    y.backward()
    inner = x.detach().clone().requires_grad_() * 1
    y = run(layers[:1], inner, table).sum()
    inner.add_(1)
    with pytest.raises(RuntimeError) as error:
        y.backward()
    messages.append(str(error.value))
    return messages


def test_misuse_is_named(workers):
    again, changed = workers.run(2, _misuse)[0]
    assert "backward through the same graph twice" in again
    assert "modified in place" in changed


def _changed_between_layers(rank):
    """With checkpoint-every, a tensor that was changed between two layers is kept, not made again."""
    results = []
    for upipe in (dict(), dict(checkpoint_every=4)):
        layers, x, table = build(**upipe)
        x.requires_grad_()
        y = run(layers[:2], x, table)
        y = run(layers[2:], y * 2, table)
        y.sum().backward()
        results.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpoints_notice_what_happens_between_layers(workers):
    assert workers.run(2, _changed_between_layers) == [True, True]


def _checkpointed(rank, reentrant):
    """Under torch's own checkpointing, which nobody needs here."""
    from torch.utils.checkpoint import checkpoint

    layers, x, table = build(keep_attention=1, checkpoint_every=2)
    results = []
    for wrap in (False, True):
        for parameter in (p for layer in layers for p in layer.parameters()):
            parameter.grad = None
        leaf = x.clone().requires_grad_()
        y = checkpoint(run, layers, leaf, table, use_reentrant=reentrant) if wrap else run(layers, leaf, table)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(workers, reentrant):
    assert workers.run(2, _checkpointed, reentrant) == [True, True]


def _frozen(rank):
    layers, x, table = build(Case(config=dict(qk_layernorm=True, add_bias_linear=True, bias_activation_fusion=False)))
    run(layers[:1], x, table).square().sum().backward()
    parameters = dict(layers[0].named_parameters())
    wanted = {name: p.grad for name, p in parameters.items()}
    for name, frozen in parameters.items():
        for p in parameters.values():
            p.requires_grad_(True)
            p.grad = None
        frozen.requires_grad_(False)
        run(layers[:1], x, table).square().sum().backward()
        for other, p in parameters.items():
            assert (p.grad is None) if other == name else torch.equal(p.grad, wanted[other]), (name, other)
    return len(parameters)


def test_frozen_parameters_get_no_gradient(workers):
    assert workers.run(2, _frozen) == [12, 12]


def _hundred(rank):
    """Host buffers and live bytes after each of 100 iterations, evaluation in between."""
    layers, x, table = build(**HOST, prefetch="on", mlp_tile_tokens=9)
    layers = layers[:2]
    store, buffers, live_bytes = host_store(x.device), [], []
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        for iteration in range(100):
            y = run(layers, x.clone().requires_grad_(), table).sum()
            y.backward()
            if iteration % 10 == 9:
                with torch.no_grad():
                    run(layers, x, table)
            del y
            buffers.append((store.buffers, store.bytes, store.in_use))
            live_bytes.append(live.now)
        gc.collect()
        for _ in range(50):  # gloo's threads let go of an exchanged tensor a little late now and then
            if live.now <= live_bytes[0]:
                break
            time.sleep(0.1)
    return buffers, live_bytes, live.now


@pytest.mark.slow
def test_nothing_grows_in_100_iterations(workers):
    for buffers, live_bytes, at_last in workers.run(2, _hundred):
        assert set(buffers) == {buffers[0]} and buffers[0][2] == 0
        assert min(live_bytes[50:]) <= min(live_bytes[:50]) and at_last <= live_bytes[0]
