"""What a model answers outside a run, and how that is scored: `rlhf generate` and `rlhf eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import MISSING, fields
from typing import Any

from rlhf_core.config.resolve import resolve
from rlhf_core.config.resolved import INVALID, Configured, ResolvedRun
from rlhf_core.config.sections import ModelConfig
from rlhf_core.entry.inference import load_for_inference, open_engine
from rlhf_core.errors import ConfigError
from rlhf_core.models.kinds import kind_for
from rlhf_core.place import LocalPlace
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.rollout.player import RunPlayer
from rlhf_core.rollout.samples import SampleRewards, rollout_of
from rlhf_core.runfolder.samples import sample_line
from rlhf_core.types import SamplingParams
from rlhf_core.wiring.inputs import RunInputs
from rlhf_core.wiring.parts import RunParts


def generate_answers(
    model: str,
    prompts: Sequence[str],
    sections: Mapping[str, Configured],
    *,
    engine: str,
    sampling: SamplingParams,
    seed: int,
    device: str,
) -> list[dict[str, Any]]:
    """An answer to each prompt, as a line of `samples.jsonl`; a tokenizer's chat template makes it a user message.

    sections: those whose players play, as in a run file: then each line is a branch of an episode, and without prompts
    one is played, of a task without a prompt. seed: of the tasks and of sampling. Raises `EpisodeError` where an
    episode fails.
    """
    config = ModelConfig(path=model, device=device)
    answering, tokenizer = open_engine(config, engine, seed)
    encoder, is_chat = PromptEncoder(tokenizer, kind=kind_for(config)), bool(prompts and tokenizer.chat_template)
    records = [{"prompt": [{"role": "user", "content": text}] if is_chat else text} for text in prompts or [""]]
    with closing(answering):
        parts = {each.name: INVALID for each in fields(ResolvedRun) if each.default is MISSING is each.default_factory}
        run = ResolvedRun(**parts, sections=sections)  # of which these sections read no other part
        encoded = [encoder.prompt(record, i, f"prompt {i + 1}") for i, record in enumerate(records)]
        with closing(RunPlayer(run, answering, tokenizer, sampling, seed=seed)) as player:
            played = player.play([(prompt, prompt.position) for prompt in encoded])
            samples = sorted(played, key=lambda each: each.sample_id)
    return [
        sample_line(
            rollout_of(row, each),
            episode=0,
            rewards=SampleRewards.of(each, {}).scores if sections else {},
            score=each.reward or 0.0,
            plays=bool(sections),
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
    policy, tokenizer, device = load_for_inference(resolved.run.model, resolved.run.train.seed)
    inputs = RunInputs(resolved)
    inputs.tokenizer = tokenizer
    place = LocalPlace(device, next(policy.parameters()).dtype)
    with closing(RunParts(inputs, place, models={"policy": policy})) as parts:
        assert parts.evaluator is not None
        metrics = parts.evaluator.evaluate()
    means = {name: metrics.get(f"eval/{name}") for name in resolved.reward_weights}
    weighted = [resolved.reward_weights[name] * mean for name, mean in means.items() if mean is not None]
    # A set that is judged otherwise has no such sum.
    return {**metrics, "eval/weighted_score": sum(weighted)} if len(weighted) == len(means) else metrics
