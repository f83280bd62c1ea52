"""Causal context-parallel attention of other packages, behind one call, to compare with.

Every peer runs its own communication code. On CPU all use the same block kernel, torch's flash attention for CPU, and
a few of their expressions are mended, see ``_mend_...``. On a GPU nothing is mended and the peers use their own
kernels; this was never run.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Order = Callable[[int, int], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """Attention of one package in one configuration.

    ``order(tokens, world)`` says which token of the whole sequence is at which place; rank r holds the r-th of
    ``world`` equal parts. ``attend(q, k, v)`` takes [s, b, heads, d] of this rank, with fewer heads of k and v for
    GQA, and returns [s, b, heads, d]; it is differentiable and collective over the world.
    """

    name: str
    order: Order
    attend: Attend
    note: str


@dataclass(frozen=True)
class _Sizes:
    heads: int
    kv_heads: int
    world: int
    device_type: str

    def require(self, name: str, degree: int) -> None:
        """That ``degree`` ranks can share the heads; with "usp" in the name, that there is a ring of them too."""
        if "usp" in name and (self.world % degree or self.world == degree):
            raise ValueError(f"{name} needs a multiple of {degree} ranks above {degree}, not {self.world}.")
        if self.heads % degree or self.kv_heads % degree:
            raise ValueError(
                f"{name} deals heads to {degree} ranks, which must divide the {self.heads} heads of queries and the "
                f"{self.kv_heads} of keys."
            )


def peers(names: Sequence[str], heads: int, kv_heads: int, device_type: str = "cpu") -> list[Peer]:
    """The peers called ``names``, in that order; collective, on the default process group.

    They can live side by side in one process, and need no teardown but that of the default group. ImportError if a
    package is missing; ValueError if a peer cannot deal these heads to this world.
    """
    sizes = _Sizes(heads, kv_heads, dist.get_world_size(), device_type)
    unknown = [name for name in names if name not in _MAKERS]
    if unknown:
        raise ValueError(f"No such peers: {', '.join(unknown)}; there are {', '.join(NAMES)}.")
    return [_MAKERS[name](name, sizes) for name in names]


def contiguous_order(tokens: int, world: int) -> Tensor:
    return torch.arange(tokens)


def zigzag_order(tokens: int, world: int, ulysses: int = 1) -> Tensor:
    """Ring rank r of R has chunks r and 2R - 1 - r, cut into equal parts for its ``ulysses`` consecutive ranks."""
    ring = world // ulysses
    chunks = torch.arange(tokens).view(2 * ring, -1)
    return torch.cat([chunks[i] for r in range(ring) for i in (r, 2 * ring - 1 - r)])


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This peer needs {package} (pip install {package}): {error}") from error


def _edit(module: ModuleType, *replacements: tuple[str, str]) -> None:
    """Runs the module's source again, in place, with expressions replaced."""
    source = inspect.getsource(module)
    for old, new in replacements:
        if old not in source:
            raise RuntimeError(f"{module.__name__} has no {old!r}; this version of the peer is not known here.")
        source = source.replace(old, new)
    exec(compile(source, module.__file__ or "", "exec"), module.__dict__)


def _block_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Block kernel on CPU, as the ring loops of yunchang and ringmaster call it: [b, s, h, d], lse [b, h, s]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(t.transpose(1, 2) for t in (q, k, v)), 0.0, causal, scale=softmax_scale
    )
    return out.transpose(1, 2), lse


def _block_backward(*args: Any, **_: Any) -> None:
    """Writes to dq, dk and dv, which are the last of the tensors given."""
    dout, q, k, v, out, lse, *targets, _dropout_p, softmax_scale, causal = args[:12]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(t.transpose(1, 2) for t in (dout, q, k, v, out)), lse.contiguous(), 0.0, causal, scale=softmax_scale
    )
    for target, gradient in zip(targets, gradients, strict=True):
        target.copy_(gradient.transpose(1, 2))


class _SequenceFirst(torch.nn.Module):
    """Attention of whole sequences, [s, b, h, d]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)


def _deepspeed(name: str, sizes: _Sizes) -> Peer:
    sizes.require(name, sizes.world)
    if sizes.device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(sys.stderr):  # where it says much when it is imported
        layer = _import("deepspeed.sequence.layer", "deepspeed")
        # else it compiles an all-reduce for CPU, which attention does not call
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        # its own backend takes over the process group that there is
        importlib.import_module("deepspeed.comm").init_distributed(dist_backend=dist.get_backend(), verbose=False)
    attention = layer.DistributedAttention(_SequenceFirst(), dist.group.WORLD)

    attend = partial(attention, batch_dim_idx=1)
    return Peer(name, contiguous_order, attend, "DistributedAttention around scaled_dot_product_attention")


@cache
def _mend_yunchang() -> None:
    basic, zigzag = (
        importlib.import_module(f"yunchang.ring.{name}") for name in ("ring_flash_attn", "zigzag_ring_flash_attn")
    )
    # gradients in fp32 alias a buffer that the next block overwrites
    copied = (".to(torch.float32)", ".to(torch.float32, copy=True)")
    _edit(basic, copied, ("dq.to(torch.bfloat16)", "dq.to(q.dtype)"))  # dq is bf16 whatever the inputs are
    _edit(zigzag, copied)
    for module in (basic, zigzag):  # none of its block kernels has a backward on CPU

        def select(attn_type: Any, stage: str, attn_processor: Any = None) -> Callable[..., Any]:
            return _block_forward if stage == "fwd-only" else _block_backward

        vars(module)["select_flash_attn_impl"] = select

    comm: Any = importlib.import_module("yunchang.ring.utils").RingComm
    send_recv, commit, wait = comm.send_recv, comm.commit, comm.wait

    # gloo cannot send to itself, which a ring of one rank does
    def send_recv_unless_alone(self: Any, to_send: Tensor, recv_tensor: Tensor | None = None) -> Tensor:
        return to_send.clone() if self.world_size == 1 else send_recv(self, to_send, recv_tensor)

    comm.send_recv = send_recv_unless_alone
    comm.commit = lambda self: None if self.world_size == 1 else commit(self)
    comm.wait = lambda self: None if self.world_size == 1 else wait(self)


def _yunchang(name: str, sizes: _Sizes, ulysses: int, ring_type: str) -> Peer:
    sizes.require(name, ulysses)
    yunchang = _import("yunchang", "yunchang")
    if sizes.device_type == "cpu":
        _mend_yunchang()
    # the module keeps these groups; the next configuration sets others
    yunchang.set_seq_parallel_pg(ulysses, sizes.world // ulysses, dist.get_rank(), sizes.world)
    kernels = importlib.import_module("yunchang.kernels")
    attention = yunchang.LongContextAttention(ring_impl_type=ring_type, attn_type=kernels.AttnType.FA)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(t.transpose(0, 1) for t in (q, k, v)), causal=True).transpose(0, 1)

    order = contiguous_order if ring_type == "basic" else partial(zigzag_order, ulysses=ulysses)
    degrees = f"Ulysses {ulysses} x ring {sizes.world // ulysses}"
    return Peer(name, order, attend, f"LongContextAttention, {degrees}, {ring_type}")


@cache
def _mend_ringmaster() -> None:
    # with gloo it gathers everything on every rank instead of an all-to-all, which gloo has
    _edit(importlib.import_module("ringmaster.comm"), ('== "gloo"', '== "no all-to-all"'))
    p2p, zigzag = (importlib.import_module(f"ringmaster.ring.{name}") for name in ("p2p_attn", "zigzag"))

    def block_forward(*args: Any) -> tuple[Tensor, Tensor, None, None]:
        return *_block_forward(*args), None, None

    # on CPU it repeats k and v to all heads and makes the matrix of scores; zigzag refuses
    for module in (p2p, zigzag):
        _edit(module, ("q.is_cuda", "True"))
        vars(module)["_flash_ops"] = lambda *_: (block_forward, _block_backward)


def _ringmaster(name: str, sizes: _Sizes, ulysses: int, balanced: bool) -> Peer:
    sizes.require(name, ulysses)
    rm, runtimes = _import("ringmaster", "axolotl-ringmaster"), importlib.import_module("ringmaster.runtime")
    registered = _import("transformers.modeling_utils", "transformers").ALL_ATTENTION_FUNCTIONS
    if sizes.device_type == "cpu":
        _mend_ringmaster()
    ring = sizes.world // ulysses
    config = rm.RingmasterConfig(
        size=sizes.world,
        backend=rm.Backend.ULYSSES if ring == 1 else rm.Backend.RING if ulysses == 1 else rm.Backend.USP,
        ulysses_size=ulysses,
        ring_size=ring,
        rotate_method=rm.RotateMethod.ALLTOALL,  # its name for sends from rank to rank
        load_balance=rm.LoadBalance.HEAD_TAIL if balanced else rm.LoadBalance.NONE,
    )
    inner = "sdpa" if sizes.device_type == "cpu" else "flash_attention_2"
    runtime = rm.setup(config, num_kv_heads=sizes.kv_heads, device_type=sizes.device_type, inner_attn=inner)
    function = registered[runtime.attn_implementation]
    rm.teardown()
    module = torch.nn.Module()  # what it and transformers ask of an attention layer
    module.is_causal, module.num_key_value_groups = True, sizes.heads // sizes.kv_heads  # type: ignore[assignment]
    module.config = SimpleNamespace(_attn_implementation=inner)  # type: ignore[assignment]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        runtimes.set_runtime(runtime)  # a global of the process, which only the forward asks for
        try:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            return function(module, q, k, v, None, dropout=0.0, scaling=None, is_causal=True)[0].transpose(0, 1)
        finally:
            runtimes.set_runtime(None)

    balance = ", head and tail" if balanced else ", not balanced" if ring > 1 else ""
    order = zigzag_order if balanced else contiguous_order
    return Peer(name, order, attend, f"{config.backend.value}, Ulysses {ulysses} x ring {ring}{balance}")


class _TorchRing(torch.autograd.Function):
    """torch's ring around a block kernel, without the DTensor around that; [b, h, s, d]."""

    REST = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")  # of the GPU's kernel

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.ring = _set_torch_ring()
        # torch itself names the GPU's kernel here, which has none for CPU
        kernel = "_scaled_dot_product_flash_attention" + ("_for_cpu" if q.device.type == "cpu" else "")
        forward, ctx.op = (getattr(torch.ops.aten, kernel + part) for part in ("", "_backward"))
        options: dict[str, Any] = {"is_causal": True, "dropout_p": 0.0, "scale": None}
        out, lse, *rest = ctx.ring._templated_ring_attention(dist.group.WORLD, 2, forward, q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options | dict(zip(_TorchRing.REST, rest, strict=False))
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _set_torch_ring()
        dq, dk, dv, *_ = ctx.ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, ctx.op, douts[0], "grad_out", *ctx.saved_tensors, **ctx.options
        )
        return dq, dk, dv


def _set_torch_ring() -> ModuleType:
    """Its options are global to the process, and both directions read them."""
    ring = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    ring._cp_options.enable_load_balance = True
    ring.set_rotate_method("alltoall")
    return ring


def _torch_ring(name: str, sizes: _Sizes) -> Peer:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return _TorchRing.apply(q, k, v).permute(2, 0, 1, 3)

    return Peer(name, zigzag_order, attend, "templated ring of torch's context_parallel, all-to-all, load balance")


_MAKERS: dict[str, Callable[[str, _Sizes], Peer]] = {
    "deepspeed": _deepspeed,
    "yunchang-ulysses": lambda name, sizes: _yunchang(name, sizes, sizes.world, "basic"),
    "yunchang-ring-zigzag": lambda name, sizes: _yunchang(name, sizes, 1, "zigzag"),
    "yunchang-usp": lambda name, sizes: _yunchang(name, sizes, 2, "zigzag"),
    "ringmaster-ulysses": lambda name, sizes: _ringmaster(name, sizes, sizes.world, False),
    "ringmaster-ring-zigzag": lambda name, sizes: _ringmaster(name, sizes, 1, True),
    "ringmaster-usp": lambda name, sizes: _ringmaster(name, sizes, 2, False),
    "torch-ring": _torch_ring,
}
NAMES = tuple(_MAKERS)
