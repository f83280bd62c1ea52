"""The order of a pass over the stages: one by one, or with exchanges beside the attention of another stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Finish = Callable[[], None]


def run_stages(
    stages: Sequence,
    bring: Callable[..., Callable[[], Any]],
    attend: Callable[..., Finish],
    overlap: bool,
) -> None:
    """Runs all ``stages`` of a pass.

    ``bring(stage)`` makes what the stage attends, and starts to exchange it; what it returns waits for that.
    ``attend(stage, what came)`` computes attention and starts to send its result back; what it returns waits for that
    and uses it. With ``overlap`` the next stage is brought, and the result of the one before comes, while a stage
    attends. Either way ``bring``, ``attend`` and what they return are called in the order of the stages each, so that
    sums are the same to the last bit.
    """
    if not overlap:
        for stage in stages:
            attend(stage, bring(stage)())()
        return
    finish: Finish | None = None
    following = bring(stages[0])
    for stage, after in zip(stages, [*stages[1:], None], strict=True):
        current = following()
        following = None if after is None else bring(after)
        sent = attend(stage, current)
        del current
        if finish is not None:
            finish()
        finish = sent
    finish()
