"""The schema of run files accepts every run file of this repository, and each of these names the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.commands.config import MARK
from rlhf_core.util import parse_yaml

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "docs" / "reference" / "run-file.schema.json"
RECIPES = sorted(ROOT.glob("recipes/*/*.yaml"))
SHIPPED = [*ROOT.glob("start/src/*/runs/*.yaml"), *ROOT.glob("plugins/*/*/src/*/quickstart/*.yaml")]


@pytest.fixture(scope="module")
def schema() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


@pytest.mark.parametrize("file", [*RECIPES, *SHIPPED], ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_schema_accepts_the_run_files_of_this_repository(schema: Any, file: Path) -> None:
    problems = schema.iter_errors(parse_yaml(file.read_text(encoding="utf-8"), str(file)))
    assert not [f"{error.json_path}: {error.message}" for error in problems]


def test_the_schema_finds_mistakes(schema: Any) -> None:
    run = {"model": {"path": "m"}, "algorithm": {"name": "ppo", "clip_esp": 0.2}, "train": {"episodes": -1}}
    places = {error.json_path for error in schema.iter_errors(run)}
    assert places == {"$.algorithm", "$.train.episodes"}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_recipe_names_the_schema(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(MARK)
    assert (file.parent / first.removeprefix(MARK)).resolve() == SCHEMA


@pytest.mark.parametrize("pattern", ["cli/rlhf_cli/templates/plugin/*/run.yaml.tmpl", "examples/*/run*.yaml"])
def test_run_files_of_other_plugins_name_the_schema_that_their_page_writes(pattern: str) -> None:
    """The schema of this repository lacks the options of these plugins."""
    files = sorted(ROOT.glob(pattern))
    assert files
    for file in files:
        assert file.read_text(encoding="utf-8").startswith(f"{MARK}run.schema.json\n"), file
    pages = [ROOT / "cli/rlhf_cli/templates/plugin/common/README.md.tmpl", ROOT / "examples/novelty/README.md"]
    for page in pages:
        assert "rlhf config schema --output " in page.read_text(encoding="utf-8")
