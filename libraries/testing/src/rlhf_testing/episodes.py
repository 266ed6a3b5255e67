"""Episodes of an environment played without a model: for its contract, `rlhf plugins check`, and tests of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_core.util.rng import derive_seed

from .engine import EOS, FakeEngine
from .models import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.config.resolved import Configured
    from rlhf_core.prompts import PromptStream
    from rlhf_core.rollout.row import Played

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_RANDOM_TOKENS = 32
"""A random text is shorter, or too long for a turn."""
_NUM_SPECIAL = 4
_SCRIPTED = 0.75
"""Share of the turns in which a given reply is written."""
_CUT = 0.2
"""Share of the random texts that are cut."""


def episode_tokenizer(*, chat: bool) -> PreTrainedTokenizerBase:
    """One token a character of printable ASCII; with `chat`, a template whose turns end by the EOS."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class ScriptedEngine(FakeEngine):
    """Writes one of `replies` or random characters, some of them cut; drawn by sample, branch and place."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, replies: Sequence[str], *, seed: int) -> None:
        super().__init__(seed=seed, vocabulary=range(_NUM_SPECIAL, len(tokenizer)), answer=self._write)
        self._replies = [[*tokenizer.encode(text, add_special_tokens=False), EOS] for text in replies]
        self.max_new_tokens = max(_RANDOM_TOKENS, *map(len, self._replies), 0)
        """Token limit of a turn: room for every reply."""
        self.sampled: list[tuple[GenerationRequest, Completion]] = []
        """Every turn that was asked for, with its answer, in order."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        asked = {(request.sample_id, request.branch): request for request in requests}
        for completion in super().generate(requests, sampling):
            self.sampled.append((asked[completion.sample_id, completion.branch], completion))
            yield completion

    def _write(self, request: GenerationRequest, version: int) -> Sequence[int]:
        noise = Random(derive_seed(self._seed, "reply", request.sample_id, request.branch, request.offset))
        if self._replies and noise.random() < _SCRIPTED:
            return noise.choice(self._replies)
        length = self.max_new_tokens if noise.random() < _CUT else noise.randrange(_RANDOM_TOKENS)
        return [*noise.choices(self._vocabulary, k=length), EOS]


@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    """Episodes that ended, and what the engine did for them."""

    played: Sequence[Played]
    """By sample id."""
    sampled: Sequence[tuple[GenerationRequest, Completion]]


def prompt_stream(
    source: Any, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, held_out: int = 0, **rules: Any
) -> PromptStream:
    """The stream of a source as a run has it. rules: of `RecordRules`."""
    from rlhf_core.prompts import PromptEncoder, PromptStream, RecordRules

    encoder = PromptEncoder(tokenizer, columns=getattr(source, "columns", {}))
    return PromptStream.of(source, RecordRules(encoder, **rules), seed=seed, held_out=held_out)


def play_episodes(
    environment: Configured,
    tokenizer: PreTrainedTokenizerBase,
    *,
    records: Sequence[Mapping[str, Any]] = (),
    replies: Sequence[str] = (),
    num_prompts: int = 4,
    samples_per_prompt: int = 2,
    seed: int = 0,
    folder: Path | None = None,
) -> PlayedEpisodes:
    """Play episodes as a run does, but for the policy, which writes `replies` or random characters.

    records: prompts as a source gives them; none is the empty tasks of a run without prompts. folder: where relative
    paths in the environment's options start. Raises what the run would.
    """
    from rlhf_episodes.player import build_environment_player

    stream = prompt_stream(records or [{"prompt": ""}] * num_prompts, tokenizer, seed=seed, may_be_empty=True)
    engine = ScriptedEngine(tokenizer, replies, seed=seed)
    player = build_environment_player(
        environment,
        engine,
        tokenizer,
        sampling=SamplingParams(max_new_tokens=engine.max_new_tokens),
        seed=seed,
        base_folder=folder,
    )
    samples = [
        (stream.prompt(position), position * samples_per_prompt + place)
        for position in range(num_prompts)
        for place in range(samples_per_prompt)
    ]
    with closing(player):
        played = sorted(player.play(samples), key=lambda each: each.sample_id)
    return PlayedEpisodes(played, tuple(engine.sampled))
