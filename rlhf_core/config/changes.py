"""Differences between two run files, and what they mean for a resumed run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MEANINGS: Mapping[str, str] = {
    "model": "the checkpoint's weights must fit the model",
    "prompts": "the same records, read from another place",
    "eval": "scores before and after cannot be compared",
    "algorithm": "holds from the next update on; what adapts goes on from its saved value",
    "optimizer": "holds from the next update on; the optimizer's moments are kept",
    "strategy": "the same training, computed otherwise: numbers may differ in their last digits",
    "rewards": "rewards before and after cannot be compared; a running normaliser keeps its moments",
    "reward_scaling": "scores before and after cannot be compared",
    "engine": "answers are sampled otherwise from the next episode on",
    "transport": "the same training, run elsewhere: the order of samples may differ",
    "train.episodes": "the run ends at another episode; a schedule that falls to 0 does so there",
    "train.seed": "prompts are drawn in another order, answers with other noise",
    "train.prompts_per_episode": "an episode is of another size; prompts may come again or be left out",
    "train.samples_per_prompt": "sample ids are counted anew and may be there twice",
    "train": "holds from the next episode on",
    "checkpoint": "learning stays the same",
    "guards": "holds from the next update on",
    "logging": "learning stays the same",
    "hooks": "depends on what the hooks do",
}
"""Key, or its first part -> the effect of changing it on a resume."""


@dataclass(frozen=True, slots=True)
class Change:
    """One changed option."""

    key: str
    before: Any
    after: Any
    """None where the option is absent."""

    @property
    def meaning(self) -> str:
        """The effect of the change on a run resumed from a checkpoint."""
        if self.key in _MEANINGS:
            return _MEANINGS[self.key]
        return _MEANINGS.get(self.key.partition(".")[0], "holds from here on")

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r} ({self.meaning})"

    def to_json(self) -> dict[str, Any]:
        """The change as JSON, for the manifest."""
        return {"key": self.key, "before": self.before, "after": self.after, "meaning": self.meaning}


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Options that differ between two resolved run files, in the order of the newer one."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    keys = [*new, *(key for key in old if key not in new)]
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        yield path, value
