"""Answers of a model outside a run, and their scores: `rlhf generate` and `rlhf eval`."""

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


class _AnsweringProblems(Problems):
    """Problems of the sections that answer prompts. The plugins of other sections need not be installed."""

    def add(self, path: str, message: str, hint: str | None = None) -> None:
        if path.partition(".")[0] in ("model", "engine", "environment"):
            super().add(path, message, hint)


def generate_answers(
    run: Mapping[str, Any], prompts: Sequence[str], *, temperature: float = 0.0, seed: int = 0
) -> list[dict[str, Any]]:
    """Return an answer to each prompt, as a line of `samples.jsonl`.

    Args:
        run: `model`, `engine` and optionally `environment`, as in a run file. With an environment, each line is a
            branch of an episode.
        prompts: Texts. If the tokenizer has a chat template, each is sent as a user message. If empty, one episode of
            a task without a prompt is played.
        temperature: Sampling temperature. 0 is greedy.
        seed: Seed of the tasks and of sampling.

    Raises:
        ConfigError: The run has a problem.
        EpisodeError: An episode fails.
    """
    tasks = {"name": "tasks", "size": max(1, len(prompts))}
    full_run = {**run, "prompts": tasks, "train": {"seed": seed}}
    resolved = resolve(full_run, where="rlhf generate", problems=_AnsweringProblems())
    plays = "environment" in run
    with closing(_answering_parts(resolved)) as parts:
        tokenizer = parts.inputs.tokenizer
        encoder = PromptEncoder(tokenizer, kind=model_kind_for(resolved.run.model))
        is_chat = bool(prompts and tokenizer.chat_template)
        records = [{"prompt": [{"role": "user", "content": text}] if is_chat else text} for text in prompts or [""]]
        encoded = [encoder.prompt(record, i, f"prompt {i + 1}") for i, record in enumerate(records)]
        with closing(parts.player("train", at_temperature(resolved.sampling, temperature))) as player:
            played = player.play([(prompt, prompt.position) for prompt in encoded])
            samples = sorted(played, key=lambda sample: sample.sample_id)
    return [
        sample_line(
            rollout_of(row, sample),
            episode=0,
            rewards=SampleRewards.of(sample, {}).scores if plays else {},
            score=sample.reward or 0.0,
            plays=plays,
        )
        for sample in samples
        for row in sample.rows
    ]


def evaluate_run(run: Mapping[str, Any], *, where: str = "run file", trust: FileTrust = EVERY_FILE) -> dict[str, float]:
    """Evaluate the model at `model.path` of a run without training it. Return its metrics `eval/…`, write no files.

    `eval/weighted_score` is the weighted sum of the mean rewards.

    Args:
        run: The run as a mapping.
        where: Name of the run in errors.
        trust: Code files that may be executed.

    Raises:
        ConfigError: The run has a problem or nothing to evaluate.
    """
    resolved = resolve(run, where=where, trust=trust)
    if not resolved.evaluation_sets:
        raise ConfigError("evaluates nothing", where=where, hint="add `eval` and `rewards`, or use --prompts FILE")
    with closing(_answering_parts(resolved)) as parts:
        assert parts.evaluator is not None
        metrics = parts.evaluator.evaluate()
    means = {name: metrics.get(f"eval/{name}") for name in resolved.reward_weights}
    weighted = [resolved.reward_weights[name] * mean for name, mean in means.items() if mean is not None]
    # The sum is undefined if the evaluation uses other rewards.
    return {**metrics, "eval/weighted_score": sum(weighted)} if len(weighted) == len(means) else metrics


def _answering_parts(resolved: ResolvedRun) -> RunParts:
    """Build the parts of a run for the model at `model.path`, in float32 on a CPU and bfloat16 on a GPU."""
    import torch

    model = resolved.run.model
    inputs, kind, device = RunInputs(resolved), model_kind_for(model), resolve_device(model.device)
    kind.check()
    place = LocalPlace(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    policy = kind.load_policy(dtype=place.parameter_dtype, seed=resolved.run.train.seed, tokenizer=inputs.tokenizer)
    return RunParts(inputs, place, models={"policy": place.prepare_inference(policy)})
