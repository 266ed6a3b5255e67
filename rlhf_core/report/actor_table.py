"""Table of what each actor of a detached run did: `actors.json`, which its driver leaves."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from .cards import duration, number
from .data import Run
from .known import is_number

_MOST = 200
"""Rows on the page."""


def actor_table(run: Run, *, named: bool) -> str:
    """A row for each actor; empty for a run without."""
    actors = [each for each in run.actors if isinstance(each, Mapping) and is_number(each.get("busy_s"))]
    if not actors:
        return ""
    rows = []
    for actor in actors[:_MOST]:
        idle = _seconds(actor.get("idle_s"))
        busy = float(actor["busy_s"])
        total = busy + sum(idle.values())
        why = sorted(idle, key=lambda reason: -idle[reason])
        values = (
            f"{busy / total:.0%}" if total > 0 else None,
            duration(busy),
            ", ".join(f"{duration(idle[reason])} {reason}" for reason in why if idle[reason] > 0),
            number(actor.get("groups")),
            number(actor.get("version")),
            number(actor.get("restarts")),
        )
        cells = "".join(f"<td>{escape(value or '–')}</td>" for value in values)
        rows.append(f"<tr><td>{escape(str(actor.get('name')))}</td>{cells}</tr>\n")
    more = f" {len(actors) - _MOST:,} more are in <code>actors.json</code>." if len(actors) > _MOST else ""
    title = f"Actors: {run.name}" if named else "Actors"
    headings = ("busy", "worked", "idle, and why", "prompts made", "weights", "started anew")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return (
        f'<h2>{escape(title)}</h2>\n<div class="panel scroll"><table><thead><tr><th>actor</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
        f'<p class="hint">Since the run was started or resumed last.{more}</p></div>\n'
    )


def _seconds(idle: Any) -> dict[str, float]:
    found = idle.items() if isinstance(idle, Mapping) else ()
    return {str(reason): float(seconds) for reason, seconds in found if is_number(seconds)}
