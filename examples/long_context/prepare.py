#!/usr/bin/env python3
"""Documents into Megatron's format, for training on long contexts: .bin and .idx of whole documents, longest kept.

    python examples/long_context/prepare.py --tokenizer HF_FOLDER --out data/books books/*.txt articles.jsonl
    python examples/long_context/prepare.py --tokenizer bytes --out data/code --min-tokens 8192 src/**/*.py

A .jsonl file has one document a line, in its field "text"; any other file is one document. Each ends with the
tokenizer's end-of-document token. Prints how the lengths are spread, which says what sequence lengths the data serve.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy
import torch

BYTES = "bytes"
END = 255  # of a document of bytes; no UTF-8 text contains it
_tokenizer = None  # of a worker process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="text, or .jsonl")
    parser.add_argument("--tokenizer", required=True, help=f"a Hugging Face folder or name, or {BYTES}")
    parser.add_argument("--out", required=True, type=Path, help="prefix of the two files")
    parser.add_argument("--min-tokens", type=int, default=1, help="leave out shorter documents (default: none)")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    missing = [str(path) for path in given.files if not path.is_file()]
    if missing:
        parser.error(f"{missing[0]} is no file")
    if given.tokenizer != BYTES:
        _start(given.tokenizer)  # once here, where an error can be told
        if _tokenizer.eos_token_id is None:
            parser.error(f"--tokenizer {given.tokenizer} has no end-of-document token (eos_token)")
    try:
        lengths = write(given)
    except ValueError as error:
        parser.error(str(error))
    if not lengths:
        for ending in (".bin", ".idx"):
            Path(f"{given.out}{ending}").unlink()
        parser.error(f"no document has --min-tokens {given.min_tokens}; the files were read to the end")
    show(lengths)
    print(f"train with --data-path {given.out}")
    return 0


def write(given: argparse.Namespace) -> list[int]:
    """Tokenizes in parallel and writes in order; the lengths of what was written."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    given.out.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{given.out}.bin", dtype=numpy.uint8 if given.tokenizer == BYTES else numpy.int32)
    lengths, left_out, started = [], 0, time.monotonic()
    last = started
    with multiprocessing.Pool(given.workers, partial(_start, given.tokenizer)) as pool:
        for tokens in pool.imap(_tokenize, texts(given.files), chunksize=1):
            if len(tokens) < max(given.min_tokens, 2):  # the end of a document alone is none
                left_out += 1
                continue
            builder.add_document(torch.from_numpy(tokens), [len(tokens)])
            lengths.append(len(tokens))
            if time.monotonic() - last > 2:
                last = time.monotonic()
                speed = sum(lengths) / (last - started)
                print(f"  {len(lengths)} documents, {speed / 1e6:.2f} M tokens/s", file=sys.stderr, flush=True)
    builder.finalize(f"{given.out}.idx")
    print(f"{len(lengths)} documents written, {left_out} shorter than {given.min_tokens} tokens left out")
    return lengths


def texts(files: list[Path]) -> Iterator[str]:
    for path in files:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _text_of(line, f"{path}, line {number}")
        else:
            yield path.read_text(encoding="utf-8", errors="replace")


def _text_of(line: str, where: str) -> str:
    try:
        return json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is no JSON object with a field text: {error}") from error


def show(lengths: list[int]) -> None:
    """Documents and tokens by the power of two below the length."""
    total = sum(lengths)
    documents = Counter(int(math.log2(length)) for length in lengths)
    tokens = Counter()
    for length in lengths:
        tokens[int(math.log2(length))] += length
    print(f"\n{'tokens of a document':>24} {'documents':>10} {'tokens':>14}  share of all tokens")
    for power in range(min(documents), max(documents) + 1):
        bar = "#" * round(40 * tokens[power] / total)
        print(f"{2**power:>11,} to {2 ** (power + 1) - 1:>9,} {documents[power]:>10,} {tokens[power]:>14,}  {bar}")
    print(f"{'all':>24} {len(lengths):>10,} {total:>14,}\n")


def _start(tokenizer: str) -> None:
    global _tokenizer
    if tokenizer != BYTES:
        from transformers import AutoTokenizer

        _tokenizer = AutoTokenizer.from_pretrained(tokenizer)


def _tokenize(text: str) -> numpy.ndarray:
    if _tokenizer is None:
        return numpy.frombuffer(text.encode() + bytes([END]), dtype=numpy.uint8).copy()
    tokens = _tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return numpy.array([*tokens, _tokenizer.eos_token_id], dtype=numpy.int32)


if __name__ == "__main__":
    sys.exit(main())
