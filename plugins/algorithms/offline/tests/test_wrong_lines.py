"""A wrong line, wherever it stands, is found before training and named by its number, for every dataset algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.errors import DataError
from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.selected import load

PAIR = {"chosen": "12", "rejected": "21"}
STEPS = {"steps": ["1", "2"], "labels": [True, False]}
WRONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sft", {"completion": "12"}, {"completion": 12}),
    ("dpo", PAIR, {"chosen": "12"}),
    ("orpo", PAIR, {**PAIR, "rejected": ""}),
    ("simpo", PAIR, {**PAIR, "chosen": None}),
    ("reward-model", PAIR, {"rejected": "21"}),
    ("kto", {"completion": "12", "label": True}, {"completion": "12", "label": "good"}),
    ("kto", {"completion": "12", "label": False}, {"label": True}),
    ("kto", PAIR, {"chosen": "12"}),
    ("process-reward-model", STEPS, {**STEPS, "labels": [True]}),
    ("process-reward-model", STEPS, {"steps": "12", "labels": [True]}),
]


@pytest.mark.parametrize(("name", "good", "wrong"), WRONG)
def test_a_wrong_line_is_named_by_its_number(
    run_file: Any, tmp_path: Path, name: str, good: dict[str, Any], wrong: dict[str, Any]
) -> None:
    lines = [json.dumps({"prompt": "21>", **(wrong if place == 77 else good)}) for place in range(200)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    run = run_file({"name": name}, prompts={"name": "jsonl", "path": str(tmp_path / "data.jsonl")})
    with pytest.raises(DataError) as caught:
        train(run, output=tmp_path / "run", dry_run=True)
    assert caught.value.where == f"{tmp_path / 'data.jsonl'}:78"


def test_every_algorithm_of_a_dataset_is_here() -> None:
    names = {ref.name for ref in discover("algorithms").values() if ref.distribution == "rlhf-offline"}
    assert names == {name for name, _, _ in WRONG}
    assert all(load("algorithms", name).component.feeds == "dataset" for name in names)
