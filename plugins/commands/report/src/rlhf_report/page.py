"""The page: HTML with the plots, the samples and the run's configuration.

All text that comes from a run goes through `escape` or, for the sample browser, through JSON in which `<`, `>` and
`&` are written as escapes. A content security policy allows this page's own script by its hash and nothing from
anywhere else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from itertools import chain
from typing import Any

import yaml

from rlhf_pages import sample_card_script

from .data import Run
from .figures import figures_for
from .table import run_table


def render(runs: Sequence[Run], plots: Mapping[str, bytes]) -> str:
    """The whole document. `plots`: figure name -> PNG."""
    style, script = _asset("style.css"), sample_card_script() + _asset("samples.js")
    has_samples = any(run.samples.groups for run in runs)
    title = _title(runs)
    parts = [
        _header(runs, title),
        run_table(runs),
        _plots(runs, plots),
        _samples(runs) if has_samples else "",
        _settings(runs),
    ]
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · rlhf report</title>
<style>
{style}</style>
</head>
<body>
<main>
{"".join(parts)}
<footer>Made by <code>rlhf report</code>, {made}. This page loads nothing from anywhere.</footer>
</main>
{f"<script>{script}</script>" if has_samples else ""}
</body>
</html>
"""


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    )


def _asset(name: str) -> str:
    """A file of this package's `assets`."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _title(runs: Sequence[Run]) -> str:
    """The algorithm and the folder's name; of several runs their names."""
    if len(runs) == 1:
        name = _option(runs[0], "algorithm", "name")
        return f"{str(name).upper()} run: {runs[0].name}" if name else runs[0].name
    names = [run.name for run in runs]
    return f"{' and '.join(names)} compared" if len(runs) == 2 else f"{len(runs)} runs compared"


def _header(runs: Sequence[Run], title: str) -> str:
    badge = ""
    if len(runs) == 1:
        status = str(runs[0].summary.get("status", "unfinished"))
        kind = {"done": "done", "failed": "failed", "rolled-back-and-failed": "failed"}.get(status, "open")
        badge = f'<span class="badge {kind}">{escape(status)}</span>'
        subtitle = " · ".join(_facts(runs[0]))
    else:
        subtitle = ", ".join(run.name for run in runs)
    return f'<header><h1>{escape(title)}</h1>{badge}<p class="facts">{escape(subtitle)}</p></header>\n'


def _facts(run: Run) -> list[str]:
    """Facts for the line under the title."""
    known = [
        ("", _option(run, "algorithm", "name")),
        ("model ", _option(run, "model", "path")),
        ("strategy ", _option(run, "strategy", "name")),
        ("transport ", _option(run, "transport", "name")),
        ("seed ", run.manifest.get("seed")),
    ]
    return [f"{label}{value}" for label, value in known if value is not None]


def _option(run: Run, section: str, name: str) -> Any:
    found = run.config.get(section)
    return found.get(name) if isinstance(found, Mapping) else None


def _plots(runs: Sequence[Run], plots: Mapping[str, bytes]) -> str:
    shown = []
    for figure in figures_for([*chain.from_iterable(run.keys() for run in runs)]):
        if figure.name in plots:
            data = base64.b64encode(plots[figure.name]).decode()
            shown.append(
                f'<figure id="{figure.name}"><h3>{escape(figure.title)}</h3>'
                f"<figcaption>{escape(figure.caption)}</figcaption>"
                f'<img alt="Plot: {escape(figure.title)}" src="data:image/png;base64,{data}"></figure>\n'
            )
    if not shown:
        return '<h2>Plots</h2>\n<p class="panel hint">No metrics yet: the run made no update.</p>\n'
    return f'<h2>Plots</h2>\n<div class="plots">\n{"".join(shown)}</div>\n'


def _samples(runs: Sequence[Run]) -> str:
    data = [{"name": run.name, "groups": run.samples.groups} for run in runs if run.samples.groups]
    total = sum(run.samples.total for run in runs)
    return (
        f'<h2 id="samples">Samples</h2>\n<div class="panel"><div class="tools" id="sample-tools"></div>'
        f'<div id="sample-list"><p class="hint">The sample browser needs JavaScript.</p></div>'
        f'<p class="hint">Chosen from {total:,} samples; <code>samples.jsonl</code> holds them all.</p></div>\n'
        f'<script type="application/json" id="sample-data">{script_json(data)}</script>\n'
    )


def script_json(value: Any) -> str:
    """JSON that can neither close its script element nor break a line in older browsers."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _settings(runs: Sequence[Run]) -> str:
    parts = ["<h2>Configuration and manifest</h2>\n"]
    for run in runs:
        config = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True) if run.config else ""
        manifest = json.dumps(dict(run.manifest), indent=2, ensure_ascii=False) if run.manifest else ""
        label = f"{run.name}: " if len(runs) > 1 else ""
        for file, text in (("config.yaml", config), ("manifest.json", manifest)):
            if text:
                summary = f"<summary>{escape(label + file)}</summary>"
                parts.append(f'<details class="panel">{summary}<pre>{escape(text)}</pre></details>\n')
    return "".join(parts) if len(parts) > 1 else ""
