"""Table of each reward's cost and failures in a run."""

from __future__ import annotations

from html import escape

from .cards import duration, number
from .data import Run

_PREFIX = "reward_calls/"
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


def reward_costs(run: Run) -> dict[str, dict[str, float]]:
    """Reward -> count -> sum over the run."""
    costs: dict[str, dict[str, float]] = {}
    for key in (key for key in run.keys() if key.startswith(_PREFIX)):  # noqa: SIM118 - a Run is no mapping
        name, _, count = key.removeprefix(_PREFIX).rpartition("/")
        costs.setdefault(name, {})[count] = sum(run.series(key)[1])
    return costs


def reward_table(run: Run, *, named: bool) -> str:
    """A row for each reward; empty for a run without rewards."""
    costs = reward_costs(run)
    if not costs:
        return ""
    shown = [
        count for count in _COUNTS if count in ("calls", "failures") or any(each.get(count) for each in costs.values())
    ]
    shown += sorted({count for each in costs.values() for count in each if each[count]} - {*_COUNTS, "seconds"})
    headings = (_COUNTS.get(count, escape(count.replace("_", " "))) for count in shown)
    head = "".join(f"<th>{heading}</th>" for heading in ("time in calls", "a call", *headings))
    rows = []
    for name, cost in costs.items():
        seconds, calls = cost.get("seconds", 0.0), cost.get("calls", 0.0)
        values = [
            duration(seconds),
            f"{1000 * seconds / calls:,.1f} ms" if calls else None,
            *(number(cost.get(count, 0.0)) for count in shown),
        ]
        cells = "".join(f"<td>{escape(value or '–')}</td>" for value in values)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>\n")
    title = f"Rewards: {run.name}" if named else "Rewards"
    return (
        f'<h2>{escape(title)}</h2>\n<div class="panel scroll"><table><thead><tr><th>reward</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
        '<p class="hint">Of all processes, evaluations left out; concurrent calls add up.</p></div>\n'
    )
