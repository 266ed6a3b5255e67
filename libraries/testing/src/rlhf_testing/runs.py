"""Run files of runs that take well under a second, for tests of whole runs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

_TINY: Mapping[str, Any] = {
    "model": {"path": "builtin:tiny-digits", "device": "cpu"},
    "prompts": {"name": "sort-digits", "num_digits": 3, "size": 64, "max_prompt_tokens": 16},
    "algorithm": {"name": "ppo"},
    "optimizer": {"lr": 1e-3},
    "rewards": [{"name": "exact-match"}],
    "engine": {"name": "hf", "max_new_tokens": 4},
    "train": {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4},
    "checkpoint": {"every_episodes": None},
    "logging": {"tensorboard": False},
}


def tiny_run(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Create a run file of two episodes with two updates each, on three-digit numbers.

    Args:
        changes: Sections to change. A mapping is merged into its section, unless it sets another plugin `name`.
            Other values replace the section.

    Returns:
        A run file as a dictionary.

    Example:
        >>> run = tiny_run({"train": {"episodes": 1}, "rewards": [{"name": "length"}]})
        >>> run["train"]["episodes"], run["train"]["prompts_per_episode"], run["rewards"]
        (1, 4, [{'name': 'length'}])
    """
    run = deepcopy(dict(_TINY))
    for section, value in (changes or {}).items():
        old = run.get(section)
        if (
            isinstance(old, dict)
            and isinstance(value, Mapping)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            run[section] = {**old, **value}
        else:
            run[section] = deepcopy(value)
    return run
