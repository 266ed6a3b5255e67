"""What a model answers outside a run, and how that is scored: `rlhf generate` and `rlhf eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from rlhf_core.config.resolve import resolve
from rlhf_core.config.resolved import INVALID, ResolvedRun, SelectedSection
from rlhf_core.config.sections import ModelConfig
from rlhf_core.entry.inference import load_for_inference, open_engine
from rlhf_core.errors import ConfigError
from rlhf_core.models.kinds import kind_for
from rlhf_core.place import LocalPlace
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.player import RunPlayer
from rlhf_core.rollout.samples import SampleRewards, rollout_of
from rlhf_core.rollout.single_answer import request_of
from rlhf_core.runfolder.samples import sample_line
from rlhf_core.types import Prompt, SamplingParams
from rlhf_core.wiring.inputs import RunInputs
from rlhf_core.wiring.parts import RunParts
from rlhf_core.wiring.players import build_player

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def generate_text(
    model: str, prompts: Sequence[str], *, engine: str, sampling: SamplingParams, seed: int, device: str
) -> list[str]:
    """A completion of each prompt. A tokenizer with a chat template gets the prompt as a user message."""
    answering, tokenizer = open_engine(ModelConfig(path=model, device=device), engine, seed)
    with closing(answering):
        encoded = _encoded(model, tokenizer, prompts)
        requests = [request_of(prompt, prompt.position) for prompt in encoded]
        answers = {done.sample_id: list(done.token_ids) for done in answering.generate(requests, sampling)}
    return [str(tokenizer.decode(answers[p.position], skip_special_tokens=True)) for p in encoded]


def _encoded(
    model: str, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, chat: bool = True
) -> list[Prompt]:
    """Texts as prompts of the model, or the empty prompt without any. chat: by the tokenizer's template, if any."""
    encoder = PromptEncoder(
        tokenizer, text_as_chat=chat and bool(tokenizer.chat_template), kind=kind_for(ModelConfig(path=model))
    )
    return [encoder.prompt({"prompt": text}, i, f"prompt {i + 1}") for i, text in enumerate(prompts or [""])]


def play_text(
    model: str,
    prompts: Sequence[str],
    sections: Mapping[str, SelectedSection],
    *,
    engine: str,
    sampling: SamplingParams,
    seed: int,
    device: str,
) -> list[dict[str, Any]]:
    """An episode for each prompt, or one of a task without a prompt, as lines of `samples.jsonl`: one for each branch.

    sections: those whose players play, as in a run file. seed: of the tasks and of sampling. Raises `EpisodeError`
    where an episode fails.
    """
    answering, tokenizer = open_engine(ModelConfig(path=model, device=device), engine, seed)
    with closing(answering):
        player = players_outside_a_run(sections, answering, tokenizer, sampling=sampling, seed=seed)
        encoded = _encoded(model, tokenizer, prompts, chat=bool(prompts))
        with closing(player):
            played = player.play([(prompt, prompt.position) for prompt in encoded])
            episodes = sorted(played, key=lambda each: each.sample_id)
    return [
        sample_line(
            rollout_of(row, each),
            episode=0,
            rewards=SampleRewards.of(each, {}).scores,
            score=each.reward or 0.0,
            plays=True,
        )
        for each in episodes
        for row in each.rows
    ]


def players_outside_a_run(
    sections: Mapping[str, SelectedSection],
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: SamplingParams,
    seed: int,
) -> RunPlayer:
    """The players of these sections, of which none reads another part of the run."""
    parts = {each.name: INVALID for each in fields(ResolvedRun) if each.default is MISSING is each.default_factory}
    return build_player(ResolvedRun(**parts, sections=sections), engine, tokenizer, sampling, seed=seed)


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
