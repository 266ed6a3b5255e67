"""The table at the top of the page: one row per run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rlhf_core.config import score_name

from .data import Run, is_number

_NOTHING = 1e-7
"""Below the resolution of float32 next to 1: a KL of -6e-09 is shown as 0.

The same as `isNothing` of core's `sample_card.js`.
"""
_HEADINGS = (
    *("run", "status", "held-out", "before", "after", "weighted score", "KL", "length", "log-prob gap"),
    *("updates", "wall time"),
)


def run_table(runs: Sequence[Run]) -> str:
    """The newest numbers of each run, as HTML."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in _HEADINGS)
    rows = [
        (
            run.name,
            str(run.summary.get("status", "unfinished")),
            score_name(run.config),
            number(run.summary.get("eval_before")),
            number(run.summary.get("eval_after")),
            number(run.last("reward/mean")),
            number(run.last("kl/mean")),
            number(run.last("response/length_mean")),
            number(run.last("rollout/logprob_gap_max")),
            number(run.last("step")),
            None if run.is_running else duration(run.summary.get("wall_s")),
        )
        for run in runs
    ]
    body = "".join("<tr>" + "".join(f"<td>{escape(cell or '–')}</td>" for cell in row) + "</tr>\n" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="panel scroll">{table}</div>\n'


def number(value: Any) -> str | None:
    """Three significant digits, thousands separated; None for a value that is not a number. Rounding errors are 0."""
    if not is_number(value):
        return None
    if abs(value) < _NOTHING:
        return "0"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: Any) -> str | None:
    """`1 h 02 min`, `2 min 05 s` or `4.2 s`; None for a value that is not a number."""
    if not is_number(seconds):
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
