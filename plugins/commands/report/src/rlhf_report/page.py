"""Renders the page with plots, samples and configuration from the template `assets/page.html`.

Jinja escapes all text of a run. A content security policy allows only this page's own script, by its hash, and no
network requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from rlhf_core.config import score_name
from rlhf_pages import picture_names, read_picture, sample_card_script

from .data import Run
from .figures import figures
from .numbers import duration, number

_HEADINGS = (
    *("run", "status", "held-out", "before", "after", "weighted score", "KL", "length", "log-prob gap"),
    *("updates", "wall time"),
)
_MAX_PICTURES_BYTES = 4 * 2**20
"""Maximum size of all pictures of a run's samples in a page."""
_BADGES = {"done": "done", "failed": "failed", "rolled-back-and-failed": "failed"}


def render(runs: Sequence[Run], plots: Mapping[str, bytes]) -> str:
    """Return the HTML document.

    Args:
        runs: one or several runs.
        plots: PNG files by name of the figure.
    """
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("rlhf_report", "assets"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    script = sample_card_script() + _asset(pages, "samples.js")
    is_one = len(runs) == 1
    status = str(runs[0].summary.get("status", "unfinished")) if is_one else None
    return pages.get_template("page.html").render(
        title=_title(runs),
        subtitle=" · ".join(_facts(runs[0])) if is_one else ", ".join(run.name for run in runs),
        status=status,
        badge=_BADGES.get(status or "", "open"),
        headings=_HEADINGS,
        rows=[_row(run) for run in runs],
        plots=[(each, base64.b64encode(plots[each.name]).decode()) for each in figures() if each.name in plots],
        samples=[
            {"name": run.name, "groups": run.samples.groups, "pictures": _pictures(run)}
            for run in runs
            if run.samples.groups
        ],
        total=sum(run.samples.total for run in runs),
        files=[*chain.from_iterable(_files(run, "" if is_one else f"{run.name}: ") for run in runs)],
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup(_asset(pages, "style.css")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _asset(pages: jinja2.Environment, name: str) -> str:
    assert pages.loader is not None
    return pages.loader.get_source(pages, name)[0]


def _title(runs: Sequence[Run]) -> str:
    """Algorithm and folder name of a run, or the names of several runs."""
    if len(runs) == 1:
        name = _option(runs[0], "algorithm", "name")
        return f"{str(name).upper()} run: {runs[0].name}" if name else runs[0].name
    names = [run.name for run in runs]
    return f"{' and '.join(names)} compared" if len(runs) == 2 else f"{len(runs)} runs compared"


def _facts(run: Run) -> list[str]:
    """Facts for the line under the title."""
    facts = [
        ("", _option(run, "algorithm", "name")),
        ("model ", _option(run, "model", "path")),
        ("strategy ", _option(run, "strategy", "name")),
        ("transport ", _option(run, "transport", "name")),
        ("seed ", run.manifest.get("seed")),
    ]
    return [f"{label}{value}" for label, value in facts if value is not None]


def _pictures(run: Run) -> dict[str, str]:
    """Return the pictures of the chosen samples in base64, by name, up to a size of the page."""
    pictures: dict[str, str] = {}
    left = _MAX_PICTURES_BYTES
    for name in picture_names(chain.from_iterable(run.samples.groups.values())):
        data = read_picture(run.path, name)
        if data is not None and len(data) <= left:
            pictures[name] = base64.b64encode(data).decode()
            left -= len(data)
    return pictures


def _option(run: Run, section: str, name: str) -> Any:
    options = run.config.get(section)
    return options.get(name) if isinstance(options, Mapping) else None


def _row(run: Run) -> tuple[str | None, ...]:
    """The newest numbers of a run, in the order of `_HEADINGS`."""
    newest = ("reward/mean", "kl/mean", "response/length_mean", "rollout/logprob_gap_max", "step")
    return (
        run.name,
        str(run.summary.get("status", "unfinished")),
        score_name(run.config),
        number(run.summary.get("eval_before")),
        number(run.summary.get("eval_after")),
        *(number(run.last(key)) for key in newest),
        None if run.is_running else duration(run.summary.get("wall_s")),
    )


def _files(run: Run, label: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of the run's configuration and manifest, if they exist."""
    if run.config:
        yield f"{label}config.yaml", yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    if run.manifest:
        yield f"{label}manifest.json", json.dumps(dict(run.manifest), indent=2, ensure_ascii=False)
