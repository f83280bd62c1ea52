"""The per-document partition without TransformerEngine; and where Megatron itself errs on packed documents."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_upipe.context import packing
from megatron_upipe.context.groups import ContextGroups
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.packing import PackedBatches, positions_in_documents
from megatron_upipe.context.segments import packed_segments
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.packed_batch import partition_indices

CPU = torch.device("cpu")


def test_partition_is_transformer_engines():
    """The expectation of ``tests/pytorch/attention/test_cp_utils.py`` in TransformerEngine 2.20."""
    cumulative = torch.tensor([0, 8, 16], dtype=torch.int32)
    assert partition_indices(cumulative, 16, 2, 0, CPU).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert partition_indices(cumulative, 16, 2, 1, CPU).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    with pytest.raises(UPipeError, match="a packed document of 7 tokens is no multiple of 4"):
        partition_indices(torch.tensor([0, 7, 16]), 16, 2, 0, CPU)


def stock_positions(cumulative, held, ranks, rank):
    """The positions that Megatron's RoPE gives to a rank's tokens: the angle of a token is its position here."""
    t = torch.ones(len(held), 1, 2, dtype=torch.float64)
    longest = int((cumulative[1:] - cumulative[:-1]).max())
    table = (torch.arange(longest, dtype=torch.float64) / 1000).view(-1, 1, 1, 1).expand(-1, 1, 1, 2)
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    turned = _apply_rotary_pos_emb_thd(t, cumulative, table, cp_group=group).squeeze(1)
    angle = torch.atan2(turned[:, 1], turned[:, 0]) - torch.atan2(torch.tensor(1.0), torch.tensor(1.0))
    return (angle * 1000).round().long().tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_stock_rope_is_right_in_the_per_document_layout(rank):
    cumulative = torch.tensor([0, 4, 16])
    segments = packed_segments(SequenceLayout(2, 1), 16, [0, 4, 16], [0, 4, 16], per_document=True)
    held = [i for half in segments.shard(rank) for i in half]
    assert stock_positions(cumulative, held, 2, rank) == positions_in_documents(segments, rank, CPU).tolist()


def test_stock_rope_errs_in_the_per_sequence_layout():
    """With --dataloader-inter-document-masking Megatron's data loader cuts the sequence in one zigzag, and its RoPE
    reads each shard as if every document lay in one of its own: wrong positions, or an error."""
    cumulative = torch.tensor([0, 4, 16])
    segments = packed_segments(SequenceLayout(2, 1), 16, [0, 4, 16], [0, 4, 16], per_document=False)
    ours = positions_in_documents(segments, 0, CPU).tolist()
    assert ours == [0, 1, 2, 3, 8, 9, 10, 11], "tokens 0-3 are one document, 12-15 the end of the other"
    held = [i for half in segments.shard(0) for i in half]
    assert stock_positions(cumulative, held, 2, 0) == [0, 3, 0, 1, 2, 9, 10, 11]
    with pytest.raises(RuntimeError, match="split"):
        stock_positions(torch.tensor([0, 5, 16]), held, 2, 0)


ALONE = ContextGroups(SequenceLayout(1, 1), None, None)


def packed(**changes):
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    return PackedSeqParams(**{"qkv_format": "thd", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(qkv_format="sbhd"), "qkv_format sbhd are not supported by UPipe; use thd"),
        (dict(cu_seqlens_kv=torch.tensor([0, 3, 6])), "cu_seqlens_q and cu_seqlens_kv differ"),
        (dict(cu_seqlens_q_padded=torch.tensor([0, 2, 6])), "cu_seqlens_q_padded and cu_seqlens_kv_padded differ"),
        (dict(cu_seqlens_q=None, cu_seqlens_kv=None), "without cu_seqlens_q"),
        (dict(local_cp_size=2), "packed_seq_params.local_cp_size is not supported .* --hybrid-context-parallel"),
    ],
)
def test_refused_parameters(changes, message):
    with pytest.raises(UPipeError, match=message):
        PackedBatches().segments(packed(**changes), ALONE, 6, True, CPU)


def test_lengths_are_read_once_a_batch():
    batches, first, second = PackedBatches(), packed(), packed()
    segments = batches.segments(first, ALONE, 6, True, CPU)
    assert segments.documents == ((0, 2), (2, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_lengths", None)  # not looked at again
        assert batches.segments(first, ALONE, 6, True, CPU) is segments
    assert batches.segments(second, ALONE, 6, True, CPU) is not segments
    assert batches.segments(second, ALONE, 8, True, CPU).length == 8


def test_the_same_object_with_other_lengths_is_another_batch():
    batches, params = PackedBatches(), packed()
    assert batches.segments(params, ALONE, 6, True, CPU).documents == ((0, 2), (2, 6))
    params.cu_seqlens_q[1] = 4  # in place; queries and keys share the tensor
    assert batches.segments(params, ALONE, 6, True, CPU).documents == ((0, 4), (4, 6))
    params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 6])
    assert batches.segments(params, ALONE, 6, True, CPU).documents == ((0, 6),)


def test_segments_known_beforehand():
    params = packed()
    params.upipe_segments = packed_segments(ALONE.layout, 6, [0, 2, 6], [0, 2, 6], per_document=True)
    assert PackedBatches().segments(params, ALONE, 6, True, CPU) is params.upipe_segments
    with pytest.raises(UPipeError, match=r"upipe_segments are of 6 tokens on .*; these ranks have 8 on"):
        PackedBatches().segments(params, ALONE, 8, True, CPU)
    params.upipe_segments = packed_segments(SequenceLayout(1, 3), 6, [0, 6], [0, 6], per_document=True)
    with pytest.raises(UPipeError, match="ring_size=3"):
        PackedBatches().segments(params, ALONE, 6, True, CPU)


def _different(rank):
    import torch.distributed as dist

    groups = ContextGroups(SequenceLayout(2, 1), dist.group.WORLD, None)
    lengths = torch.tensor([0, 4, 8] if rank == 0 else [0, 8])
    with pytest.raises(UPipeError, match="given different packed_seq_params"):
        PackedBatches().segments(packed(cu_seqlens_q=lengths, cu_seqlens_kv=lengths), groups, 4, True, CPU)
    # one rank's are no lengths at all: both raise
    bad = torch.tensor([0, 9, 8] if rank == 0 else [0, 8])
    with pytest.raises(UPipeError, match="no cumulative lengths" if rank == 0 else "different packed_seq_params"):
        PackedBatches().segments(packed(cu_seqlens_q=bad, cu_seqlens_kv=bad), groups, 4, True, CPU)
    same = torch.tensor([0, 4, 8])
    PackedBatches().segments(packed(cu_seqlens_q=same, cu_seqlens_kv=same), groups, 4, True, CPU)
    return True


def test_ranks_that_disagree_are_told_so(workers):
    assert workers.run(2, _different) == [True, True]
