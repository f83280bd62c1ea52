"""Fixtures and settings shared by all tests."""

import os
import sys
from pathlib import Path

import pytest

# One thread a process, and glibc keeps large tensors: what the forked workers and torchrun runs inherit.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]

from workers import WorkerPool  # noqa: E402


@pytest.fixture(scope="session")
def workers():
    """The session's pool of gloo workers."""
    pool = WorkerPool()
    yield pool
    pool.close()
