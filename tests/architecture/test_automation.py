"""Workflows, the Dockerfile and the development container fit the repository."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def workflows(root: Path) -> dict[str, Any]:
    files = (root / ".github" / "workflows").glob("*.yml")
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in files}


def commands(workflow: Any) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job.get("steps", ()) if "run" in step]


def test_a_change_is_checked_by_the_script_of_the_repository(workflows: dict[str, Any]) -> None:
    assert ".ci/run" in commands(workflows["ci"])


def test_every_supported_interpreter_is_tested(workflows: dict[str, Any], root: Path) -> None:
    manifest = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    oldest = manifest["project"]["requires-python"].removeprefix(">=")
    tested = workflows["ci"]["jobs"]["interpreters"]["strategy"]["matrix"]["python"]
    assert tested == ["3.11", "3.12", "3.13", "3.14"] and tested[0] == oldest


def test_workflows_run_targets_of_the_makefile_with_a_deadline(workflows: dict[str, Any], root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for workflow in workflows.values():
        for command in commands(workflow):
            if command.startswith("make "):
                words = re.sub(r"\S+=\S*\$\{\{.*?\}\}", "", command).split()[1:]
                assert words and set(words) <= targets, command
        assert all("timeout-minutes" in job or "uses" in job for job in workflow["jobs"].values())


def test_publishing_holds_no_token(workflows: dict[str, Any]) -> None:
    publish = workflows["publish"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and "environment" in publish
    assert "secrets." not in json.dumps(workflows)


def test_the_container_copies_files_that_exist(root: Path) -> None:
    text = (root / "Dockerfile").read_text(encoding="utf-8")
    targets = re.findall(r"^FROM \S+ AS (\w+)$", text, flags=re.M)
    assert {"cpu", "cuda", "dev"} <= set(targets)
    manifest = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert re.findall(r"^ARG TORCH=(.*)$", text, flags=re.M) == manifest["tool"]["uv"]["constraint-dependencies"]
    copied = re.findall(r"^COPY (?!--from)(\S+) ", text, flags=re.M)
    assert copied and all((root / path).exists() for path in copied)
    assert set(re.findall(r"^COPY --from=(\w+)", text, flags=re.M)) <= set(targets)
    container = json.loads((root / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert container["build"]["target"] in targets
    assert (root / ".devcontainer" / container["build"]["dockerfile"]).resolve() == root / "Dockerfile"
