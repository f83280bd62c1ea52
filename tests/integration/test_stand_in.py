"""The CPU stand-in: answers Megatron only, and leaves nothing behind."""

import types

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import cpu
from megatron_upipe.integration.cpu import stand_in
from megatron_upipe.integration.symbols import _holder, for_this_megatron, registry


@pytest.fixture
def installed():
    cpu.install()
    yield
    cpu.uninstall()


def as_megatron(source: str):
    """Evaluates ``source`` in a module that is named like one of Megatron's."""
    module = types.ModuleType("megatron.core.some_module")
    module.torch = torch
    return eval(source, vars(module))


def test_uninstall_restores_every_symbol():
    symbols = [r.symbol for r in for_this_megatron(stand_in._replacements())]

    def state():
        return {s: vars(_holder(s)[0]).get(_holder(s)[1], "not there") for s in symbols}

    before = state()
    cpu.install()
    during = state()
    cpu.uninstall()
    unchanged = {s for s in symbols if before[s] is during[s]}
    assert unchanged <= {"megatron.core.optimizer.distrib_optimizer:USING_TE_OPTIMIZER"}  # False here already
    after = state()
    assert all(after[s] is before[s] for s in symbols)
    assert not cpu.is_installed() and stand_in.OWNER not in registry.owners()


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("torch.cuda.is_available()", True),
        ("torch.cuda.device_count()", 1),
        ("torch.cuda.current_device()", torch.device("cpu")),
        ("torch.zeros(2, device='cuda').device.type", "cpu"),
        ("torch.zeros(2, device=torch.cuda.current_device()).cuda().pin_memory().device.type", "cpu"),
        ("torch.zeros(2).to('cuda:0').type()", "torch.cuda.FloatTensor"),
        ("torch.zeros(2).bfloat16().type()", "torch.cuda.BFloat16Tensor"),
        ("torch.cuda.Event().query()", True),
        ("torch.cuda.current_stream().wait_stream(torch.cuda.Stream())", None),
    ],
)
def test_answers_megatron(installed, source, answer):
    assert as_megatron(source) == answer


def test_answers_nobody_else(installed):
    assert torch.zeros(2).type() == "torch.FloatTensor"
    if not torch.cuda.is_available():
        assert torch.cuda.device_count() == 0
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")


def test_rng_tracker_forks_and_returns(installed):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.manual_seed(1)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    outside = torch.rand(3)
    with tracker.fork():
        inside = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), outside)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), inside)


def test_refuses_when_a_gpu_is_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UPipeError, match="this process already uses a GPU; leave out --upipe-cpu"):
        cpu.install()
    assert not cpu.is_installed()


def test_refuses_a_second_install(installed):
    with pytest.raises(UPipeError, match="already installed"):
        cpu.install()


def test_says_that_it_is_on(capsys):
    cpu.install()
    cpu.uninstall()
    assert capsys.readouterr().out == stand_in.NOTICE + "\n"


def config(**changes):
    return TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm", persist_layer_norm=False, **changes
    )


def test_norm_takes_part_in_sequence_parallelism(installed):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parallel = config(tensor_model_parallel_size=2, sequence_parallel=True)
    norm = WrappedTorchNorm(parallel, 8, eps=1e-6)
    assert isinstance(norm, torch.nn.RMSNorm) and norm.eps == 1e-6
    assert norm.weight.sequence_parallel is True
    assert WrappedTorchNorm(config(), 8).weight.sequence_parallel is False


def test_norm_refuses_what_torch_has_not(installed):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    with pytest.raises(UPipeError, match="--apply-layernorm-1p is not available on a CPU"):
        WrappedTorchNorm(config(layernorm_zero_centered_gamma=True), 8)


def test_device_contexts_still_work(workers):
    """``with torch.device("meta")`` remembers torch's factories at its first use, here after they were replaced."""
    assert workers.run(1, _on_meta) == ["meta"]


def _on_meta(rank):
    with torch.device("meta"):
        return torch.arange(3).device.type
