"""Drawings of simulations; matplotlib is needed for these alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.states import GIB

if TYPE_CHECKING:
    from megatron_upipe.planning.report import Report

M = 2**20


def check_folder(flag: str, path: str | None) -> None:
    """Raises UPipeError unless ``path``, if any, can be drawn to; before any work."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir() or not Path(path).suffix:
        raise UPipeError(f"{flag} {path} is not a picture in an existing folder; name one, such as {folder}/out.png")
    _pyplot(flag)


def draw_timeline(reports: Sequence[Report], path: Path) -> None:
    """Live bytes over the step, states included."""
    figure, axes = _pyplot("--timeline").subplots(figsize=(10, 5))
    for r in reports:
        if r.step is None:
            continue
        states = r.scenario.states.sharded
        line = [(states + size) / GIB for size in r.step.timeline]
        axes.plot([i / len(line) for i in range(len(line))], line, label=r.scenario.method, linewidth=0.8)
        axes.axhline(states / GIB, color="grey", linewidth=0.5)
    axes.set_xlabel("a step of the simulated layers, embedding and loss")
    axes.set_ylabel("GiB on the device, states included (simulated)")
    _save(figure, axes, path)


def draw_lengths(lines: Mapping[str, Sequence[tuple[int, float]]], limit: float, title: str, path: Path) -> None:
    """Peak bytes over tokens, a line for each method, up to a card's ``limit`` bytes."""
    figure, axes = _pyplot("--plot").subplots(figsize=(8, 5))
    for method, points in lines.items():
        axes.plot([tokens / M for tokens, _ in points], [size / GIB for _, size in points], label=method, marker=".")
    axes.axhline(limit / GIB, color="black", linestyle="--", label="card, less the reserve")
    axes.set_xlabel("context length, M tokens")
    axes.set_ylabel("peak GiB of a rank (simulated)")
    axes.set_ylim(0, 1.5 * limit / GIB)
    axes.set_title(title, fontsize=9)
    _save(figure, axes, path)


def _pyplot(flag: str) -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UPipeError(f"{flag} needs matplotlib; pip install matplotlib") from error
    return plt


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"drawn: {path}", file=sys.stderr)
