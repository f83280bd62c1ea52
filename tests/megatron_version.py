"""Marks for what one of the supported megatron-core versions has not."""

import pytest

from megatron_upipe.integration.versions import megatron_core_version

BEFORE_019 = megatron_core_version().release < (0, 19)
since_019 = pytest.mark.skipif(BEFORE_019, reason="megatron-core 0.18 has not got this")
