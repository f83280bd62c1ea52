"""Built-in GPT pre-training over ``megatron.training``, for machines without a Megatron-LM checkout.

The wheel of megatron-core contains the training loop but no entry script. This one reads mock or indexed data, plain
language-model loss only, also on packed documents; fill-in-the-middle and ModelOpt need a checkout's
``pretrain_gpt.py``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.upipe_spec import masks_documents
from megatron_upipe.integration.versions import megatron_core_version

if megatron_core_version().release < (0, 19):
    from megatron_upipe.integration import gpt_entry_018 as this_megatron
else:
    from megatron_upipe.integration import gpt_entry_019 as this_megatron

PACKED_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", *PACKED_KEYS)

# attribute of Megatron's arguments -> flag; this entry has no code for them
NEEDS_CHECKOUT = {
    "fim_data": "--fim-data",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "mtp_num_layers": "--mtp-num-layers",
    "logits_load_dir": "--logits-load-dir",
    "per_dataset_sequences_path": "--per-dataset-sequences-path",
    "check_for_spiky_loss": "--check-for-spiky-loss",
    "inprocess_restart": "--inprocess-restart",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
}

# dataset option -> attribute of the arguments, where the names differ or are many
DATASET_OPTIONS = {
    "split": "split",
    "multiple_validation_sets": "multiple_validation_sets",
    "full_validation": "full_validation",
    "num_dataset_builder_threads": "num_dataset_builder_threads",
    "path_to_cache": "data_cache_path",
    "mmap_bin_files": "mmap_bin_files",
    "object_storage_cache_path": "object_storage_cache_path",
    "mid_level_dataset_surplus": "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens": "allow_ambiguous_pad_tokens",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
    "reset_position_ids": "reset_position_ids",
    "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "inter_document_masking": "dataloader_inter_document_masking",
    "context_parallel_size": "context_parallel_size",
}


def main() -> None:
    """Parses ``sys.argv`` and runs Megatron's ``pretrain()``. Raises UPipeError for flags that it has no code for."""
    args = parse_and_validate_args()
    for attribute, flag in NEEDS_CHECKOUT.items():
        if getattr(args, attribute, None):
            script = "pretrain_hybrid.py" if attribute == "hybrid_layer_pattern" else "pretrain_gpt.py"
            raise UPipeError(f"{flag} is not in the built-in GPT entry; name {script} of a Megatron-LM checkout")
    datasets_provider.is_distributed = True
    this_megatron.start(args, datasets_provider, forward_step, partial(embedding_ranks, args))


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Train, validation and test datasets; collective over the world."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    known = {field.name for field in fields(GPTDatasetConfig)}  # 0.18 has fewer
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        tokenizer=build_tokenizer(args),
        **{option: getattr(args, attribute) for option, attribute in DATASET_OPTIONS.items() if option in known},
    )
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, partial(_reads_data, vp_stage), config).build()


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple:
    """One micro-batch: per-token losses ``[b, S/(P*R)]`` and the function that reduces them."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_parameters(batch),
    )
    return losses, partial(reduce_loss, batch["loss_mask"])


def get_batch(data_iterator: Iterator, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """This rank's shard of the next micro-batch; on the inner pipeline stages only what says how it is packed."""
    args = get_args()
    inner = not is_first_or_last_pipeline_stage(vp_stage)
    if inner and not is_packed(args):
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {key: sample[key].cuda(non_blocking=True) if key in sample else None for key in BATCH_KEYS}
        if inner:
            batch |= dict.fromkeys(set(BATCH_KEYS) - set(PACKED_KEYS))
    batch = this_megatron.share_with_tensor_ranks(
        batch,
        packed=is_packed(args),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if inner:
        return batch
    return this_megatron.take_context_shard(
        batch, masks_documents(args) and not args.sft, mpu.get_context_parallel_group()
    )


def is_packed(args: Namespace) -> bool:
    """Whether a sequence has several documents that do not see each other."""
    return bool(args.sft or masks_documents(args))


def packed_parameters(batch: dict[str, Any]) -> PackedSeqParams | None:
    """What the layers are told of the batch's documents, if it is packed."""
    if batch.get("cu_seqlens") is None:
        return None
    real = batch["cu_seqlens"].squeeze(0)
    if torch.is_grad_enabled():  # for the FLOPs in the log, which are those of training
        update_seqlen_stats_from_cu_seqlens(real)
    padded = batch.get("cu_seqlens_padded")
    padded = real if padded is None else padded.squeeze(0)
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **this_megatron.sample_length(get_args()),
    )


def reduce_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Summed loss of this rank's unmasked tokens, their number, and both again for the log."""
    loss_mask = loss_mask.reshape(-1).float()
    loss = (losses.reshape(-1).float() * loss_mask).sum()
    tokens = loss_mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for bad, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=bad, message=f"{name} in this rank's loss", tolerance=0.0, fatal=True
            )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def embedding_ranks(args: Namespace, pp_ranks: list[int]) -> list[int]:
    """Pipeline ranks that hold the word embedding: the first, and the last when it shares the weight."""
    shared = len(pp_ranks) > 1 and not args.untie_embeddings_and_output_weights
    return [pp_ranks[0], pp_ranks[-1]] if shared else [pp_ranks[0]]


def _reads_data(vp_stage: int | None) -> bool:
    everywhere = is_packed(get_args())  # every pipeline stage has to know the documents
    return mpu.get_tensor_model_parallel_rank() == 0 and (everywhere or is_first_or_last_pipeline_stage(vp_stage))
