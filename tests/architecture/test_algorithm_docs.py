"""Every option of an algorithm, and every metric it gives, is on its page."""

import inspect
import re
from pathlib import Path

import pytest

from rlhf_core.plugins.discovery import discover, import_target
from rlhf_core.plugins.selected import load

DOCS = Path(__file__).resolve().parents[2] / "docs" / "algorithms"
SHARED = ["critic-free.md", "policy-objective.md"]
PAGES = {
    "ppo": ["ppo.md", "policy-objective.md"],
    "grpo": ["grpo.md", *SHARED],
    "rloo": ["rloo.md", *SHARED],
    "reinforce++": ["reinforce-plus-plus.md", *SHARED],
    "rejection-sampling": ["rejection-sampling.md", *SHARED],
    "online-dpo": ["online-dpo.md", *SHARED],
    "distill": ["distill.md"],
    "sft": ["sft.md"],
    "dpo": ["dpo.md"],
    "kto": ["kto.md"],
    "orpo": ["orpo.md"],
    "simpo": ["simpo.md"],
    "reward-model": ["reward-model.md"],
    "process-reward-model": ["process-reward-model.md"],
}
PLUGINS = Path(__file__).resolve().parents[2] / "plugins" / "algorithms"
METRIC = re.compile(r'"((?:group|distill|off_policy|preference|imitation|sft|step|policy|kl|reward)/[a-z_]+)"')


def quoted(names: list[str]) -> set[str]:
    return {name for page in names for name in re.findall(r"`([^`\s]+)`", (DOCS / page).read_text("utf-8"))}


@pytest.mark.parametrize("algorithm", PAGES)
def test_every_option_is_on_the_page(algorithm: str) -> None:
    options = set(load("algorithms", algorithm).component.config.model_fields)
    assert not options - quoted(PAGES[algorithm])


FOLDERS = {
    "group": SHARED,
    "distill": ["distill.md"],
    "offline": ["sft.md", "dpo.md", "kto.md", "orpo.md", "process-reward-model.md"],
}


@pytest.mark.parametrize(("folder", "pages"), FOLDERS.items(), ids=FOLDERS)
def test_every_metric_is_on_a_page(folder: str, pages: list[str]) -> None:
    files = [*PLUGINS.glob(f"{folder}/src/*/*.py")]
    if folder == "group":
        objective = PLUGINS.parents[1] / "libraries/objective/src/rlhf_objective"
        files += [objective / "functional" / "losses.py", *objective.glob("*.py")]
    metrics = {name for path in files for name in METRIC.findall(path.read_text("utf-8"))}
    assert metrics and not metrics - quoted(pages)


@pytest.mark.parametrize("kind", ["advantages", "policy_losses"])
def test_every_function_is_in_the_table_with_two_who_have_it(kind: str) -> None:
    rows = [line.split(" | ") for line in (DOCS / "policy-objective.md").read_text("utf-8").splitlines()]
    told = {row[0].strip("| `"): row for row in rows if len(row) == 6}
    for ref in discover(kind).values():
        row = told[ref.name]
        assert all(cell.strip(" |") for cell in (*row[:2], *row[3:])), f"{ref.name}: formula, source, when, who else"
        assert len(row[5].split(",")) == 2, row[5]
        for option in inspect.signature(import_target(ref)).parameters.values():
            assert option.kind is not option.KEYWORD_ONLY or f"`{option.name}`" in row[2], (ref.name, option.name)
