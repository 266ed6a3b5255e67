"""The pages say what the code has."""

import itertools
import re
from pathlib import Path

import pytest

from rlhf_core.components import KINDS
from rlhf_core.config.sections import RewardCallOptions, RunConfig
from rlhf_core.hookspecs import SPECS

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "start/README.md",
    "libraries/*/README.md",
    "plugins/*/*/README.md",
    "recipes/**/*.md",
)
PAGES = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def expanded(text: str) -> set[str]:
    """Names in back-ticks, with `a_{b,c}` standing for `a_b` and `a_c`."""
    names: set[str] = set()
    for quoted in re.findall(r"`([^`\s]+)`", text):
        parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", quoted)]
        names.update("".join(choice) for choice in itertools.product(*parts))
    return names


def test_every_hook_is_on_its_page() -> None:
    hooks = {name for spec in SPECS.values() for name in vars(spec) if name.startswith("rlhf_")}
    documented = {name for name in expanded(page("hooks.md")) if name.startswith("rlhf_") and "/" not in name}
    assert hooks == documented


def test_every_section_of_a_run_file_is_on_its_page() -> None:
    assert set(RunConfig.model_fields) <= expanded(page("run-file.md"))


def test_every_key_of_how_a_reward_is_run_is_on_its_page() -> None:
    assert set(RewardCallOptions.model_fields) <= expanded(page("rewards.md"))


def test_every_kind_of_plugin_is_on_its_page() -> None:
    assert {f"rlhf.{kind}" for kind in KINDS} <= expanded(page("plugins.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    dead = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not dead


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_named_in_pages_exist(path: Path) -> None:
    named = re.findall(
        r"`((?:rlhf_core|cli|plugins|docs|tests|recipes|requirements)/[\w./-]*)`", path.read_text("utf-8")
    )
    assert not [name for name in named if not (ROOT / name).exists()]
