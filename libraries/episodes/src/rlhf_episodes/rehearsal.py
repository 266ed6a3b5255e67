"""One turn of an environment with a made-up answer: its errors appear before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, cast

from rlhf_core.protocols import RolloutEngine
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_core.wiring.inputs import RunInputs
from rlhf_core.wiring.players import build_player

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .options import EnvironmentOptions

_ANSWER_TOKENS = 8


def play_one_turn(inputs: RunInputs, config: EnvironmentOptions) -> None:
    """Play the first prompt until its first turn is answered, as the run would: with deadlines.

    config: the section of the run. Raises `EpisodeError`, or another error that the run would raise.
    """
    resolved = inputs.resolved
    one_turn = config.model_copy(update={"max_turns": 1})
    shortened = {
        name: replace(each, config=one_turn) if each.config is config else each
        for name, each in resolved.sections.items()
    }
    resolved = replace(resolved, sections=shortened)
    options = getattr(resolved.engine.config, "request_options", {})
    answering = cast(RolloutEngine, _MadeUpAnswers(inputs.tokenizer, options))
    with closing(build_player(resolved, answering, inputs.tokenizer)) as player:
        list(player.play([(inputs.prompts.prompt(0), 0)]))


@dataclass(frozen=True, slots=True)
class _MadeUpAnswers:
    """The part of an engine that a player uses: a few random tokens for each request."""

    tokenizer: PreTrainedTokenizerBase
    request_options: Mapping[str, str]
    policy_version: int = 0
    context_tokens: int | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self.tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset({int(cast(int, eos))})

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        special = set(self.tokenizer.all_special_ids)
        for request in requests:
            noise = Random(request.sample_id)
            limit = min(_ANSWER_TOKENS, request.max_new_tokens or sampling.max_new_tokens)
            drawn = noise.sample(range(len(self.tokenizer)), min(len(self.tokenizer), _ANSWER_TOKENS + len(special)))
            tokens = [each for each in drawn if each not in special][: limit - 1]
            tokens = [*tokens, *self.eos_token_ids] or drawn[:1]
            yield Completion(
                sample_id=request.sample_id,
                token_ids=tuple(tokens),
                logprobs=(0.0,) * len(tokens),
                finish_reason="stop" if self.eos_token_ids else "length",
                policy_version=0,
                branch=request.branch,
                support_ids=[[token] for token in tokens] if sampling.top_k else None,
            )
