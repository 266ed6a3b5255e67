"""Answers from a model folder, outside a run: what `rlhf generate` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from rlhf_core.config.resolved import INVALID, ResolvedRun, SelectedSection
from rlhf_core.config.sections import ModelConfig
from rlhf_core.entry.inference import open_engine
from rlhf_core.models.kinds import kind_for
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.run_player import RunPlayer
from rlhf_core.rollout.samples import SampleRewards, rollout_of
from rlhf_core.rollout.single_answer import request_of
from rlhf_core.runfolder.samples import SampleRecord
from rlhf_core.types import Prompt, SamplingParams
from rlhf_core.wiring.players import player_of

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
        player = _player(sections, answering, tokenizer, sampling=sampling, seed=seed)
        encoded = _encoded(model, tokenizer, prompts, chat=bool(prompts))
        with closing(player):
            played = player.play([(prompt, prompt.position) for prompt in encoded])
            episodes = sorted(played, key=lambda each: each.sample_id)
    return [
        SampleRecord.of(
            rollout_of(row, each),
            episode=0,
            rewards=SampleRewards.of(each, {}).scores,
            score=each.reward or 0.0,
            plays=True,
        ).to_json()
        for each in episodes
        for row in each.rows
    ]


def _player(
    sections: Mapping[str, SelectedSection],
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: SamplingParams,
    seed: int,
) -> RunPlayer:
    """The players of these sections, of which none reads another part of the run."""
    parts = {each.name: INVALID for each in fields(ResolvedRun) if each.default is MISSING is each.default_factory}
    return player_of(ResolvedRun(**parts, sections=sections), engine, tokenizer, sampling, seed=seed)
