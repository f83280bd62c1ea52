"""The paper's published peaks, from its project page and charts (GiB); one of them fitted one constant."""

import pytest

from megatron_upipe.planning.authors import authors_bytes
from megatron_upipe.planning.models import PRESETS
from megatron_upipe.planning.scenario import Scenario, parse_tokens

PUBLISHED = [
    ("llama3-8b", 8, 1, "128K", 21.1),
    ("llama3-8b", 8, 1, "3M", 51.1),
    ("llama3-8b", 16, 2, "512K", 15.7),
    ("llama3-8b", 16, 2, "2M", 26.4),
    ("llama3-8b", 16, 2, "4M", 40.8),
    ("llama3-8b", 16, 2, "6M", 55.2),
    ("llama3-8b", 16, 2, "8M", 69.5),
    ("qwen3-32b-no-qk-norm", 16, 2, "128K", 39.98),
]


@pytest.mark.parametrize(("model", "gpus", "ring", "tokens", "gib"), PUBLISHED)
def test_published_peaks(model, gpus, ring, tokens, gib):
    found = authors_bytes(Scenario(PRESETS[model], gpus, parse_tokens(tokens), ring=ring))
    assert sum(found.values()) / 2**30 == pytest.approx(gib, rel=0.03), found
