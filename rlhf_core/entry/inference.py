"""Answers from a model folder, outside a run: `rlhf generate`, and what `rlhf eval` and `rlhf serve` begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..components import EngineContext
from ..config.resolved import INVALID, ResolvedRun, SelectedSection
from ..config.sections import ModelConfig
from ..contexts import own_device
from ..models.kinds import kind_for
from ..models.loading import check_model, load_policy, load_tokenizer
from ..plugins.discovery import load, resolve_build
from ..prompts.stream import PromptEncoder
from ..protocols import RolloutEngine
from ..rollout.run_player import RunPlayer
from ..rollout.samples import SampleRewards, rollout_of
from ..rollout.single_answer import request_of
from ..runfolder.samples import SampleRecord
from ..types import Prompt, SamplingParams
from ..util.weight_files import load_weights
from ..wiring.players import player_of

if TYPE_CHECKING:
    import torch
    from torch import nn
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
    return player_of(ResolvedRun(**parts, sections=sections), engine, tokenizer, sampling, seed=seed)


def open_engine(
    config: ModelConfig, engine: str, seed: int, *, weights: Path | None = None, in_flight: bool = False
) -> tuple[RolloutEngine, PreTrainedTokenizerBase]:
    """An engine over a model that is loaded for it.

    weights: of a checkpoint, in place of the model's own. in_flight: call `generate_in_flight` if the engine has it.
    """
    selected = load("engines", engine)
    policy, tokenizer, place = load_for_inference(config, seed, weights=weights)
    context = EngineContext(
        policy,
        tokenizer,
        place,
        seed,
        model_path=config.path,
        in_flight=in_flight and selected.component.in_flight,
    )
    built = resolve_build(selected)(selected.component.config(), context)
    return cast(RolloutEngine, built), tokenizer


def load_for_inference(
    config: ModelConfig, seed: int, *, weights: Path | None = None
) -> tuple[nn.Module, PreTrainedTokenizerBase, torch.device]:
    """A model that only answers, in float32 on a CPU and bfloat16 on a GPU, its tokenizer, and where it is."""
    import torch

    check_model(config)
    tokenizer = load_tokenizer(config)
    place = own_device(config.device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    policy = load_policy(config, dtype=dtype, seed=seed, tokenizer=tokenizer)
    if weights is not None:
        load_weights(policy, weights)
    return policy.to(place).eval(), tokenizer, place  # type: ignore[arg-type]
