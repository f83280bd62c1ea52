"""What attention of packed documents costs: with the documents, not with the square of the whole sequence.

  python benchmarks/packed_cost.py                 # on this machine's CPU or GPU
  python benchmarks/packed_cost.py --tokens 16384 --json

Forward and backward of one rank's heads over the whole sequence, cut into documents of different number and length, or
under a sliding window, side by side with one document, interleaved; medians of the ratios. Beside it what the number
of visible pairs of tokens predicts, and how many rows of keys and values a rank of --ring ranks sends on average (by
index arithmetic, nothing is sent), both against one document's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.pieces import RingMask, count
from megatron_upipe.context.ring import ring_backward, ring_forward
from megatron_upipe.kernels.select import select_kernel
from megatron_upipe.planning.documents import seen_pairs, segments_of

ALONE = SequenceLayout(1, 1)


def cases(tokens: int, window: int) -> dict[str, tuple[list[int], int | None]]:
    """Name -> lengths of documents, window."""
    found: dict[str, tuple[list[int], int | None]] = {
        f"{n} documents of {tokens // n}": ([tokens // n] * n, None) for n in (2, 4, 8, 16, 64)
    }
    found["one of half, the rest of 1/32 each"] = ([tokens // 2] + [tokens // 32] * 16, None)
    found[f"one document, window {window}"] = ([tokens], window)
    found[f"4 documents of {tokens // 4}, window {window}"] = ([tokens // 4] * 4, window)
    return found


def mask_of(layout: SequenceLayout, lengths: list[int], window: int | None) -> RingMask:
    return RingMask(segments_of(lengths, layout, sum(lengths), per_document=False), causal=True, window=window)


def pairs(lengths: list[int], window: int | None) -> float:
    """Visible pairs of a query and a key."""
    return sum(seen_pairs(n, n, True, window) for n in lengths)


def sent_rows(lengths: list[int], window: int | None, ring: int) -> float:
    """Rows of keys and values that a ring rank sends on average in forward."""
    mask = mask_of(SequenceLayout(1, ring), lengths, window)
    steps = [mask.step(rank, source) for rank in range(ring) for source in range(ring) if rank != source]
    length = mask.segments.ring_length
    return sum(length if step.sent_whole else count(step.seen) for step in steps if step is not None) / ring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the sequence, a multiple of 64 (default 8192)")
    parser.add_argument("--heads", type=int, default=4, help="query heads (default 4), half as many KV heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=512, help="tokens (default 512)")
    parser.add_argument("--ring", type=int, default=4, help="ranks for the count of rows sent (default 4)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tokens % 64 or args.tokens < 64:
        nearest = max(1, round(args.tokens / 64)) * 64
        parser.error(f"--tokens {args.tokens} is no multiple of 64; the nearest is {nearest}")

    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    kernel = select_kernel(device, dtype, args.head_dim, window=True)
    torch.manual_seed(0)
    shape = (1, args.heads, args.tokens, args.head_dim)
    q, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    kv = torch.randn(1, args.heads // 2 * 2, *shape[2:], device=device, dtype=dtype)

    def seconds(mask: RingMask) -> float:
        _synchronize(device)
        start = time.perf_counter()
        out, lse = ring_forward(kernel, q, kv, mask, 0.1, None)
        ring_backward(kernel, dout, q, kv, out, lse, mask, 0.1, None)[1]()
        _synchronize(device)
        return time.perf_counter() - start

    whole = mask_of(ALONE, [args.tokens], None)
    rows = {}
    for name, (lengths, window) in cases(args.tokens, args.window).items():
        mask = mask_of(ALONE, lengths, window)
        seconds(whole), seconds(mask)  # warm-up
        ratios = []
        for _ in range(args.repeats):
            one = seconds(whole)
            ratios.append(seconds(mask) / one)
        rows[name] = dict(
            time=statistics.median(ratios),
            pairs=pairs(lengths, window) / pairs([args.tokens], None),
            sent=sent_rows(lengths, window, args.ring) / sent_rows([args.tokens], None, args.ring),
        )
    if args.json:
        head = dict(device=str(device), kernel=kernel.name, tokens=args.tokens)
        print(json.dumps({**head, "cases": rows}, indent=1))
        return
    print(f"{args.tokens} tokens, {args.heads} heads of {args.head_dim}, {dtype}, {kernel.name} on {device}")
    print(f"{'of one document':38}{'time':>8}{'pairs':>8}{f'sent, R {args.ring}':>12}")
    for name, row in rows.items():
        print(f"{name:38}{row['time']:8.3f}{row['pairs']:8.3f}{row['sent']:12.3f}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
