"""What a release promises: nothing public breaks unsaid, and what changed is told in fragments."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from running import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    return importlib.import_module("api")


def test_nothing_public_breaks_unsaid(api: ModuleType) -> None:
    assert not (found := api.unwanted()), "\n".join(found)


def test_what_was_released_is_all_compared(api: ModuleType) -> None:
    assert len([*api.RECORDED.glob("*.pyi")]) > 30
    assert "prompt_ids: tuple[int, ...]" in (api.RECORDED / "rlhf_core.types.pyi").read_text(encoding="utf-8")


def test_a_break_is_found_until_a_fragment_names_it(
    api: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(api.RECORDED, tmp_path / "api")
    released = tmp_path / "api" / "rlhf_core.errors.pyi"
    old = released.read_text(encoding="utf-8")
    released.write_text(old + "\ndef gone(text: str) -> None:\n    ...\n", encoding="utf-8")
    monkeypatch.setattr(api, "RECORDED", tmp_path / "api")
    monkeypatch.setattr(api, "CHANGES", tmp_path)
    (told,) = [each for each in api.unwanted() if "errors.gone" in each]
    assert told.startswith("rlhf_core.errors.gone: ") and "changes/NAME.breaking.md" in told
    (tmp_path / "errors.breaking.md").write_text("`rlhf_core.errors.gone` is gone: take `full_disk`.\n")
    assert not [each for each in api.unwanted() if "errors.gone" in each]


def test_fragments_are_of_a_known_kind_and_short() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    kinds = {kind["directory"] for kind in settings["type"]}
    fragments = [path for path in (ROOT / settings["directory"]).iterdir() if path.name != "README.md"]
    wrong = [path.name for path in fragments if path.suffix != ".md" or path.name.split(".")[1] not in kinds]
    assert fragments and not wrong, f"changes/NAME.KIND.md with a KIND of {sorted(kinds)}: {wrong}"
    empty = [path.name for path in fragments if not path.read_text(encoding="utf-8").strip()]
    assert not empty


def test_fragments_make_a_changelog() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9", "--date", "2000-01-01"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "## 9.9.9 (2000-01-01)" in done.stdout and "- `rlhf dashboard`" in done.stdout


def test_upgrading_is_told_of_every_version_with_breaks() -> None:
    """A release with breaking fragments has its part in docs/upgrading.md, which `make changelog` reminds of."""
    page = (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = changelog.split("\n## ")[1:]
    breaking = [part.split()[0] for part in releases if "\n### What breaks" in part]
    missing = [version for version in breaking if f"## To {version}" not in page]
    assert not missing, f"docs/upgrading.md has no part about {missing}"
