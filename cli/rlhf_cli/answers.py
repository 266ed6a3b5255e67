"""What a model answers outside a run, and how that is scored: `rlhf generate` and `rlhf eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from rlhf_core.config.problems import Problems
from rlhf_core.config.resolve import resolve
from rlhf_core.config.resolved import ResolvedRun
from rlhf_core.errors import ConfigError
from rlhf_core.models.kinds import model_kind_for
from rlhf_core.place import LocalPlace, resolve_device
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.rollout.evaluate import at_temperature
from rlhf_core.rollout.samples import SampleRewards, rollout_of
from rlhf_core.runfolder.samples import sample_line
from rlhf_core.wiring.inputs import RunInputs
from rlhf_core.wiring.parts import RunParts


class _OfAnswering(Problems):
    """Those of the parts that answer: what else a run has need not be installed."""

    def add(self, path: str, message: str, hint: str | None = None) -> None:
        if path.partition(".")[0] in ("model", "engine", "environment"):
            super().add(path, message, hint)


def generate_answers(
    run: Mapping[str, Any], prompts: Sequence[str], *, temperature: float = 0.0, seed: int = 0
) -> list[dict[str, Any]]:
    """An answer to each prompt, as a line of `samples.jsonl`; a tokenizer's chat template makes it a user message.

    run: `model`, `engine` and, where it is played in, `environment`, as in a run file: then each line is a branch of an
    episode, and without prompts one is played, of a task without a prompt. temperature: 0 is greedy. seed: of the tasks
    and of sampling. Raises `ConfigError`, and `EpisodeError` where an episode fails.
    """
    tasks = {"name": "tasks", "size": max(1, len(prompts))}
    asked = {**run, "prompts": tasks, "train": {"seed": seed}}
    resolved = resolve(asked, where="rlhf generate", problems=_OfAnswering())
    plays = "environment" in run
    with closing(_answering(resolved)) as parts:
        tokenizer = parts.inputs.tokenizer
        encoder = PromptEncoder(tokenizer, kind=model_kind_for(resolved.run.model))
        is_chat = bool(prompts and tokenizer.chat_template)
        records = [{"prompt": [{"role": "user", "content": text}] if is_chat else text} for text in prompts or [""]]
        encoded = [encoder.prompt(record, i, f"prompt {i + 1}") for i, record in enumerate(records)]
        with closing(parts.player("train", at_temperature(resolved.sampling, temperature))) as player:
            played = player.play([(prompt, prompt.position) for prompt in encoded])
            samples = sorted(played, key=lambda each: each.sample_id)
    return [
        sample_line(
            rollout_of(row, each),
            episode=0,
            rewards=SampleRewards.of(each, {}).scores if plays else {},
            score=each.reward or 0.0,
            plays=plays,
        )
        for each in samples
        for row in each.rows
    ]


def evaluate_run(run: Mapping[str, Any], *, where: str = "run file", trust: FileTrust = EVERY_FILE) -> dict[str, float]:
    """The metrics `eval/…` of a run's model as it is at `model.path`; nothing is trained and nothing written.

    `eval/weighted_score` is the sum of the mean rewards by their weights.

    where: how errors call the run. Raises `ConfigError` where the run has nothing to evaluate on.
    """
    resolved = resolve(run, where=where, trust=trust)
    if not resolved.evaluation_sets:
        raise ConfigError("evaluates nothing", where=where, hint="give it `eval` and `rewards`, or: --prompts FILE")
    with closing(_answering(resolved)) as parts:
        assert parts.evaluator is not None
        metrics = parts.evaluator.evaluate()
    means = {name: metrics.get(f"eval/{name}") for name in resolved.reward_weights}
    weighted = [resolved.reward_weights[name] * mean for name, mean in means.items() if mean is not None]
    # A set that is judged otherwise has no such sum.
    return {**metrics, "eval/weighted_score": sum(weighted)} if len(weighted) == len(means) else metrics


def _answering(resolved: ResolvedRun) -> RunParts:
    """The parts of a run around its model as it is at `model.path`, which answers and is not trained.

    In float32 on a CPU and bfloat16 on a GPU.
    """
    import torch

    model = resolved.run.model
    inputs, kind, device = RunInputs(resolved), model_kind_for(model), resolve_device(model.device)
    kind.check()
    place = LocalPlace(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    policy = kind.load_policy(dtype=place.parameter_dtype, seed=resolved.run.train.seed, tokenizer=inputs.tokenizer)
    return RunParts(inputs, place, models={"policy": place.prepare_inference(policy)})
