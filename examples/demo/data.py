"""Real text that is on every machine: the Python standard library's own sources, as bytes, in Megatron's format."""

import sysconfig
from pathlib import Path

from model import EOD


def prepare(prefix: Path) -> None:
    """Writes ``prefix``.bin and .idx, one document a source file, unless they exist."""
    bin_path, idx_path = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    if idx_path.exists():
        return
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = sorted(p for p in stdlib.rglob("*.py") if "site-packages" not in p.parts)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(bin_path), dtype=numpy.uint8)
    total = 0
    for source in sources:
        document = source.read_bytes().replace(bytes([EOD]), b"?") + bytes([EOD])
        builder.add_document(torch.frombuffer(bytearray(document), dtype=torch.uint8), [len(document)])
        total += len(document)
    builder.finalize(str(idx_path))
    print(f"data: {len(sources)} source files of {stdlib}, {total / 2**20:.1f} MiB", flush=True)
