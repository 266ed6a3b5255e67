"""What to look at first: the few findings that decide what a reader does next, each with a link to its plot."""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from typing import Any

from .cards import held_out, number
from .data import Run, is_number

_MANY_CUT = 0.2
"""Share of truncated answers above which the token limit decides what is learned."""
_WIDE_GAP = 0.1
"""Nats between trainer and engine above which the two do not agree on what was sampled."""


def first_look(run: Run, plots: Collection[str]) -> str:
    """A list of findings; empty for a run without any. plots: names of the figures on the page."""
    found = [*_ending(run), *_scores(run), *_warnings(run)]
    if run.samples.groups:
        found.append(("samples", "Read the worst and the best samples: are they what the score says?"))
    if not found:
        return ""
    shown = {*plots, "samples"}
    items = "".join(
        f'<li><a href="#{place}">{escape(text)}</a></li>' if place in shown else f"<li>{escape(text)}</li>"
        for place, text in found
    )
    return f'<h2>What to look at first</h2>\n<ol class="panel look">{items}</ol>\n'


def _ending(run: Run) -> list[tuple[str, str]]:
    status = str(run.summary.get("status", "unfinished"))
    if status == "done":
        return []
    return [("", "It is still running." if run.is_running else f"It ended as “{status}”: run.log has the reason.")]


def _scores(run: Run) -> list[tuple[str, str]]:
    before, after = run.summary.get("eval_before"), run.summary.get("eval_after")
    found = [("eval", f"{held_out(run)} {_change(before, after)}.")] if is_number(before) and is_number(after) else []
    if not found and "eval/score" not in run.keys():  # noqa: SIM118 - a Run is no mapping
        found = [("", "Nothing was evaluated on held-out prompts: the reward alone does not show what was learned.")]
    _, rewards = run.series("reward/mean")
    return [*found, ("reward", f"Weighted score in training {_change(rewards[0], rewards[-1])}.")] if rewards else found


def _warnings(run: Run) -> list[tuple[str, str]]:
    cut, gap = run.last("response/truncated_fraction"), run.last("rollout/logprob_gap_max")
    found = []
    if cut is not None and cut > _MANY_CUT:
        found.append(("truncated", f"{cut:.0%} of the last answers were cut by the token limit."))
    if gap is not None and gap > _WIDE_GAP:
        found.append(("logprob-gap", f"Trainer and engine differ by up to {number(gap)} nats on the same tokens."))
    return found


def _change(before: Any, after: Any) -> str:
    old, new = number(before), number(after)
    if old == new:
        return f"stayed at {new}"
    return f"{'rose' if float(after) > float(before) else 'fell'} from {old} to {new}"
