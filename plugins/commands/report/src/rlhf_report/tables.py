"""Tables of the page: runs side by side, what each actor of a detached run did, what each reward cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rlhf_core.config import score_name

from .cards import duration, number, titled
from .data import Run, is_number

_MOST_ACTORS = 200
"""Rows on the page."""
_REWARDS = "reward_calls/"
_COUNTS = {
    "calls": "calls",
    "failures": "failed",
    "retries": "tried again",
    "cache_hits": "from the cache",
    "zeroed": "samples scored 0",
    "dropped": "samples dropped",
}
"""Name in the metrics -> heading; columns after the first two are left out where 0 for all rewards.

What a reward counts itself comes behind, under its own name.
"""


def comparison(runs: Sequence[Run]) -> str:
    """A row for each run."""
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
            number(run.last("step")),
            None if run.is_running else duration(run.summary.get("wall_s")),
        )
        for run in runs
    ]
    columns = ("status", "held-out", "before", "after", "weighted score", "KL", "length", "updates", "wall time")
    return _panel(("run", *columns), rows)


def actor_table(run: Run, *, named: bool) -> str:
    """A row for each actor, from `actors.json`, which a detached run's driver leaves; empty for a run without."""
    actors = [each for each in run.actors if isinstance(each, Mapping) and is_number(each.get("busy_s"))]
    if not actors:
        return ""
    rows = []
    for actor in actors[:_MOST_ACTORS]:
        idle = _seconds(actor.get("idle_s"))
        busy = float(actor["busy_s"])
        total = busy + sum(idle.values())
        why = sorted(idle, key=lambda reason: -idle[reason])
        rows.append(
            (
                str(actor.get("name")),
                f"{busy / total:.0%}" if total > 0 else None,
                duration(busy),
                ", ".join(f"{duration(idle[reason])} {reason}" for reason in why if idle[reason] > 0),
                number(actor.get("groups")),
                number(actor.get("version")),
                number(actor.get("restarts")),
            )
        )
    more = len(actors) - _MOST_ACTORS
    hint = "Since the run was started or resumed last."
    hint += f" {more:,} more are in <code>actors.json</code>." if more > 0 else ""
    headings = ("actor", "busy", "worked", "idle, and why", "prompts made", "weights", "started anew")
    return _panel(headings, rows, title=titled("Actors", run, named=named), hint=hint)


def reward_table(run: Run, *, named: bool) -> str:
    """A row for each reward; empty for a run without rewards."""
    costs: dict[str, dict[str, float]] = {}
    for key in (key for key in run.keys() if key.startswith(_REWARDS)):  # noqa: SIM118 - a Run is no mapping
        name, _, count = key.removeprefix(_REWARDS).rpartition("/")
        costs.setdefault(name, {})[count] = sum(run.series(key)[1])
    if not costs:
        return ""
    shown = [
        count for count in _COUNTS if count in ("calls", "failures") or any(each.get(count) for each in costs.values())
    ]
    shown += sorted({count for each in costs.values() for count in each if each[count]} - {*_COUNTS, "seconds"})
    rows = []
    for name, cost in costs.items():
        seconds, calls = cost.get("seconds", 0.0), cost.get("calls", 0.0)
        each = f"{1000 * seconds / calls:,.1f} ms" if calls else None
        rows.append((name, duration(seconds), each, *(number(cost.get(count, 0.0)) for count in shown)))
    headings = ("reward", "time in calls", "a call", *(_COUNTS.get(count, count.replace("_", " ")) for count in shown))
    hint = "Of all processes, evaluations left out; concurrent calls add up."
    return _panel(headings, rows, title=titled("Rewards", run, named=named), hint=hint)


def _panel(headings: Sequence[str], rows: Iterable[Sequence[str | None]], *, title: str = "", hint: str = "") -> str:
    """A table under its title; `hint` is HTML."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell or '–')}</td>" for cell in row) + "</tr>\n" for row in rows)
    above = f"<h2>{escape(title)}</h2>\n" if title else ""
    below = f'<p class="hint">{hint}</p>' if hint else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'{above}<div class="panel scroll">{table}{below}</div>\n'


def _seconds(idle: Any) -> dict[str, float]:
    found = idle.items() if isinstance(idle, Mapping) else ()
    return {str(reason): float(seconds) for reason, seconds in found if is_number(seconds)}
