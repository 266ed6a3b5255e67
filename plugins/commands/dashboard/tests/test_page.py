"""The page's scripts in node, where it is installed: sorting, search, and the best run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_SECONDS

from rlhf_pages import sample_card_script

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


def row(name: str, *, reward: float | None = None, after: float | None = None, **changes: Any) -> dict[str, Any]:
    last = {"step": 3} if reward is None else {"step": 3, "reward/mean": reward}
    found = {"id": name, "name": name, "parent": None, "status": "done", "algorithm": "ppo", "model": "tiny"}
    return {**found, "last": last, "eval_before": None, "eval_after": after, "wall_s": 1.0, "changed": 0.0, **changes}


ROWS = [
    row("beta", reward=0.9, after=0.2, changed=40.0),
    row("alpha", reward=0.1, after=0.7, changed=30.0, algorithm="grpo"),
    row("alpha/warm-start", reward=None, changed=20.0, parent="alpha", algorithm="sft"),
    row("gamma", changed=10.0, status="failed", model="large"),
]


def page(rows: list[dict[str, Any]], *actions: tuple[str, str]) -> list[dict[str, Any]]:
    """The table of runs at the start and after each action."""
    static = files("rlhf_dashboard") / "static"
    html = (static / "index.html").read_text(encoding="utf-8")
    names = re.findall(r'src="/static/([\w.]+)"', html)
    scripts = [
        sample_card_script() if name == "sample_card.js" else (static / name).read_text(encoding="utf-8")
        for name in names
    ]
    given = {"scripts": scripts, "ids": re.findall(r'id="(\w+)"', html), "rows": rows, "do": actions}
    assert NODE is not None
    done = subprocess.run(
        [NODE, str(Path(__file__).with_name("page.js"))],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = json.loads(done.stdout)
    return seen


def names(table: dict[str, Any]) -> list[str]:
    return [re.sub(r" best$", "", cells[1]) for cells in table["rows"]]


def test_a_click_on_a_heading_sorts_and_another_turns_it_round() -> None:
    start, by_name, back, by_reward, lowest = page(
        ROWS, ("sort", "run"), ("sort", "run"), ("sort", "reward"), ("sort", "reward")
    )
    assert names(start) == ["beta", "alpha", "└ warm-start", "gamma"] and start["sorted"] == {"changed": "descending"}
    assert names(by_name) == ["alpha", "└ warm-start", "beta", "gamma"] and by_name["sorted"] == {"run": "ascending"}
    assert names(back) == ["gamma", "beta", "alpha", "└ warm-start"] and back["sorted"] == {"run": "descending"}
    assert names(by_reward) == ["beta", "alpha", "└ warm-start", "gamma"], "a run without a value comes last"
    assert names(lowest) == ["alpha", "└ warm-start", "beta", "gamma"], "either way"


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("BETA", ["beta"]),
        ("failed", ["gamma"]),
        ("large", ["gamma"]),
        ("sft", ["alpha", "└ warm-start"]),
        ("ppo tiny", ["beta"]),
        ("ppo grpo", []),
        (" ", ["beta", "alpha", "└ warm-start", "gamma"]),
    ],
)
def test_search_looks_for_all_words_and_keeps_the_parent_of_what_it_finds(typed: str, found: list[str]) -> None:
    assert names(page(ROWS, ("search", typed))[-1]) == found


def test_the_best_run_is_marked_and_selected_at_first_and_by_the_button() -> None:
    (start,) = page(ROWS)
    assert start["best"] == start["shown"] == start["chosen"] == ["alpha"], "its score after training is the highest"
    going = [*ROWS, row("delta", status="running", reward=5.0)]
    start, clicked = page(going, ("click", "best"))
    assert start["shown"] == start["chosen"] == ["delta"], "the run that is going on"
    assert clicked["shown"] == start["best"] == ["alpha"]
    assert sorted(clicked["chosen"]) == ["alpha", "delta"]


def test_without_scores_the_best_run_has_the_highest_reward() -> None:
    (table,) = page([row("low", reward=0.25), row("none"), row("high", reward=0.5)])
    assert table["best"] == table["shown"] == ["high"]


def test_a_single_run_has_no_tools_and_no_mark() -> None:
    (table,) = page([row("only", after=0.5)])
    assert table["best"] == [] and not table["tools"]


@pytest.mark.parametrize(("value", "shown"), [(7.64e-14, "0"), (-6e-9, "0"), (2e-7, "2e-7"), (0.12345, "0.123")])
def test_a_number_below_the_resolution_of_float32_is_shown_as_0(value: float, shown: str) -> None:
    (table,) = page([row("only", reward=value)])
    assert table["rows"][0][table["heads"].index("reward")] == shown
