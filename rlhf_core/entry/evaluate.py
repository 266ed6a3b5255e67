"""Scores of a model on what a run evaluates on, outside of the run: `rlhf eval`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..config.resolve import resolve
from ..errors import ConfigError
from ..plugins.trust import EVERY_FILE, FileTrust
from .inference import load_for_inference

if TYPE_CHECKING:
    import torch

    from ..strategy import Strategy


@dataclass(frozen=True, slots=True)
class _Alone:
    """The part of a strategy that an evaluation in one process asks for."""

    device: torch.device
    compute_dtype: None = None
    rank: int = 0
    world_size: int = 1

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]


def evaluate_run(run: Mapping[str, Any], *, where: str = "run file", trust: FileTrust = EVERY_FILE) -> dict[str, float]:
    """The metrics `eval/…` of a run's model as it is at `model.path`; nothing is trained and nothing written.

    `eval/weighted_score` is the sum of the mean rewards by their weights.

    where: how errors call the run. Raises `ConfigError` where the run has nothing to evaluate on.
    """
    from ..build import build_engine, build_eval_prompts, build_evaluator, build_run_prompts, build_scorer

    resolved = resolve(run, where=where, trust=trust)
    if not resolved.evaluation_sets:
        raise ConfigError("evaluates nothing", where=where, hint="give it `eval` and `rewards`, or: --prompts FILE")
    policy, tokenizer, device = load_for_inference(resolved.run.model, resolved.run.train.seed)
    place = cast("Strategy", _Alone(device))
    streams = build_eval_prompts(resolved, tokenizer)
    names = [name for name, _ in resolved.evaluation_sets]
    prompts = build_run_prompts(resolved, tokenizer) if set(names) - set(streams) else streams[names[0]]
    engine = build_engine(resolved, policy, tokenizer, place)
    with closing(engine), closing(build_scorer(resolved, device)) as scorer:
        evaluator = build_evaluator(resolved, engine, tokenizer, scorer, prompts, place, streams)
        with closing(evaluator):
            metrics = evaluator.evaluate()
    means = {name: metrics.get(f"eval/{name}") for name in resolved.reward_weights}
    weighted = [resolved.reward_weights[name] * mean for name, mean in means.items() if mean is not None]
    # A set that is judged otherwise has no such sum.
    return {**metrics, "eval/weighted_score": sum(weighted)} if len(weighted) == len(means) else metrics
