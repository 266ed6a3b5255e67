"""Scores of a model on what a run evaluates on, outside of the run: `rlhf eval`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from ..config.resolve import resolve
from ..errors import ConfigError
from ..place import LocalPlace
from ..plugins.trust import EVERY_FILE, FileTrust
from ..wiring.inputs import RunInputs
from ..wiring.parts import RunParts
from .inference import load_for_inference


def evaluate_run(run: Mapping[str, Any], *, where: str = "run file", trust: FileTrust = EVERY_FILE) -> dict[str, float]:
    """The metrics `eval/…` of a run's model as it is at `model.path`; nothing is trained and nothing written.

    `eval/weighted_score` is the sum of the mean rewards by their weights.

    where: how errors call the run. Raises `ConfigError` where the run has nothing to evaluate on.
    """
    resolved = resolve(run, where=where, trust=trust)
    if not resolved.evaluation_sets:
        raise ConfigError("evaluates nothing", where=where, hint="give it `eval` and `rewards`, or: --prompts FILE")
    policy, tokenizer, device = load_for_inference(resolved.run.model, resolved.run.train.seed)
    inputs = RunInputs(resolved)
    inputs.tokenizer = tokenizer
    place = LocalPlace(device, next(policy.parameters()).dtype)
    with closing(RunParts(inputs, place, {"policy": policy})) as parts:
        assert parts.evaluator is not None
        metrics = parts.evaluator.evaluate()
    means = {name: metrics.get(f"eval/{name}") for name in resolved.reward_weights}
    weighted = [resolved.reward_weights[name] * mean for name, mean in means.items() if mean is not None]
    # A set that is judged otherwise has no such sum.
    return {**metrics, "eval/weighted_score": sum(weighted)} if len(weighted) == len(means) else metrics
