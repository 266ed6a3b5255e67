"""The figures at the top of the page, and the time bar."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from rlhf_core.config import score_name

from .data import Run, is_number

_NOTHING = 1e-7
"""Below the resolution of float32 next to 1: a KL of -6e-09 is none.

The same as `isNothing` of core's `sample_card.js`.
"""


def facts(run: Run) -> list[str]:
    """Facts for the line under the title."""
    algorithm, strategy, transport = (
        _name(run.config.get(section)) for section in ("algorithm", "strategy", "transport")
    )
    model = run.config.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    seed = run.manifest.get("seed")
    known = [
        ("", algorithm),
        ("model ", path),
        ("strategy ", strategy),
        ("transport ", transport),
        ("seed ", seed),
    ]
    return [f"{label}{value}" for label, value in known if value is not None]


def cards(run: Run) -> str:
    """The summary cards of one run; those without a value are left out."""
    _, scores = run.series("reward/mean")
    made = [
        _change_card(held_out(run), run.summary.get("eval_before"), run.summary.get("eval_after")),
        _change_card("Weighted score", scores[0], scores[-1]) if scores else "",
        _last_card(run, "KL", "kl/mean", "nats, last episode"),
        _last_card(run, "Response length", "response/length_mean", "tokens, last episode"),
        _count_card(run),
        _card("Wall time", None if run.is_running else duration(run.summary.get("wall_s")), "whole run"),
        _card("Samples per second", number(run.performance.get("samples_per_second")), "whole fit"),
        _last_card(run, "Log-prob gap", "rollout/logprob_gap_max", "nats, trainer against engine"),
    ]
    shown = "".join(made)
    return f'<section class="cards">\n{shown}</section>\n' if shown else ""


def held_out(run: Run) -> str:
    """How the score of evaluations is called."""
    name = score_name(run.config)
    return "Held-out score" if name is None else f"Held-out {name}"


def bars(run: Run, *, named: bool) -> str:
    """Time bars from `performance.json`; empty without it."""
    shares = run.performance.get("time_share")
    if not isinstance(shares, Mapping) or not shares:
        return ""
    pieces, legend = [], []
    for index, (phase, share) in enumerate((phase, share) for phase, share in shares.items() if is_number(share)):
        color = f"c{min(index, 4)}"
        percent = max(0.0, min(100.0, 100 * float(share)))
        pieces.append(f'<span class="w {color}" style="width:{percent:.2f}%"></span>')
        legend.append(f'<span><i class="{color}"></i>{escape(str(phase))} {percent:.0f}%</span>')
    lines = [f"{escape(label)} {escape(text)}" for label, text in _speeds(run.performance)]
    title = titled("Where the time went", run, named=named)
    return (
        f'<h2>{escape(title)}</h2>\n<div class="panel"><div class="bar">{"".join(pieces)}</div>'
        f'<div class="legend">{"".join(legend)}</div><p class="hint">{" · ".join(lines)}</p></div>\n'
    )


def titled(title: str, run: Run, *, named: bool) -> str:
    """The title of a part of the page; `named` where there are several runs."""
    return f"{title}: {run.name}" if named else title


def number(value: Any) -> str | None:
    """Three significant digits, thousands separated; None for a value that is not a number.

    What is nothing but rounding is 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) < _NOTHING:
        return "0"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: Any) -> str | None:
    """`1 h 02 min`, `2 min 05 s` or `4.2 s`."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def status_class(status: str) -> str:
    """The colour of a status."""
    return {"done": "done", "failed": "failed", "rolled-back-and-failed": "failed"}.get(status, "open")


def _speeds(performance: Mapping[str, Any]) -> list[tuple[str, str]]:
    units = (("tokens_per_second", "tokens/s"), ("tflop_per_second", "TFLOP/s"), ("mfu", "MFU"))
    found = []
    for key, unit in units:
        values = performance.get(key)
        if isinstance(values, Mapping):
            found += [(str(phase), f"{number(value)} {unit}") for phase, value in values.items() if number(value)]
    return found


def _card(name: str, value: str | None, note: str = "", *, before: str = "", tone: str = "") -> str:
    """before: an earlier value, shown small; tone: a class of the note."""
    if value is None:
        return ""
    earlier = f"<small>{escape(before)} →</small> " if before else ""
    kind = f"note {tone}" if tone else "note"
    return (
        f'<div class="card"><div class="name">{escape(name)}</div>'
        f'<div class="value">{earlier}{escape(value)}</div><div class="{kind}">{escape(note)}</div></div>\n'
    )


def _change_card(name: str, before: Any, after: Any) -> str:
    old, new = number(before), number(after)
    if new is None:
        return _card(name, old, "before training")
    if old is None:
        return _card(name, new, "after training")
    change = float(after) - float(before)
    tone = "up" if change > 0 else "down" if change < 0 else ""
    return _card(name, new, f"{change:+.3g}", before=old, tone=tone)


def _last_card(run: Run, name: str, key: str, note: str) -> str:
    return _card(name, number(run.last(key)), note)


def _count_card(run: Run) -> str:
    _, episodes = run.series("episode")
    count = len(set(episodes))
    note = f"in {count:,} episode{'s' if count > 1 else ''}" if count else ""
    return _card("Updates", number(sum(line["step"] > 0 for line in run.lines)), note)


def _name(section: Any) -> Any:
    return section.get("name") if isinstance(section, Mapping) else None
