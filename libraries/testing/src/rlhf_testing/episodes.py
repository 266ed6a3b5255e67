"""Play episodes of an environment without a model: for its contract, `rlhf plugins check`, and your own tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
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
"""Random texts are shorter than this, or too long for a turn."""
_NUM_SPECIAL = 4
_SCRIPTED_SHARE = 0.75
"""Share of turns in which a given reply is written."""
_CUT_SHARE = 0.2
"""Share of random texts that are truncated."""


def episode_tokenizer(*, chat: bool) -> PreTrainedTokenizerBase:
    """Create a tokenizer with one token per character of printable ASCII.

    Args:
        chat: Add a chat template whose turns end with EOS.

    Returns:
        A transformers tokenizer.

    Example:
        >>> tokenizer = episode_tokenizer(chat=False)
        >>> tokenizer.decode(tokenizer.encode("2 + 2", add_special_tokens=False))
        '2 + 2'
    """
    tokenizer = tiny_tokenizer(CHARACTERS)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class ScriptedEngine(FakeEngine):
    """Engine that writes one of `replies` or random characters, sometimes truncated.

    The text depends on seed, sample, branch and offset.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, replies: Sequence[str], *, seed: int) -> None:
        """Create an engine at policy version 0.

        Args:
            tokenizer: Tokenizer of the replies and random texts.
            replies: Texts to write. Empty writes random characters only.
            seed: Seed of the choice.
        """
        super().__init__(seed=seed, vocabulary=range(_NUM_SPECIAL, len(tokenizer)), answer=self._write)
        self._replies = [[*tokenizer.encode(text, add_special_tokens=False), EOS] for text in replies]
        self.max_new_tokens = max(_RANDOM_TOKENS, *map(len, self._replies), 0)
        """Token limit of a turn, large enough for every reply."""
        self.sampled: list[tuple[GenerationRequest, Completion]] = []
        """All requested turns with their completions, in order."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        by_branch = {(request.sample_id, request.branch): request for request in requests}
        for completion in super().generate(requests, sampling):
            self.sampled.append((by_branch[completion.sample_id, completion.branch], completion))
            yield completion

    def _write(self, request: GenerationRequest, version: int) -> Sequence[int]:
        noise = Random(derive_seed(self._seed, "reply", request.sample_id, request.branch, request.offset))
        if self._replies and noise.random() < _SCRIPTED_SHARE:
            return noise.choice(self._replies)
        length = self.max_new_tokens if noise.random() < _CUT_SHARE else noise.randrange(_RANDOM_TOKENS)
        return [*noise.choices(self._vocabulary, k=length), EOS]


def plain(value: Any) -> Any:
    """Return nested dicts and sequences with tensors and arrays as lists.

    Args:
        value: A value to compare with another.

    Example:
        >>> plain({"row": (1, 2)})
        {'row': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    """Finished episodes and the completions of the engine."""

    played: Sequence[Played]
    """Episodes by sample id."""
    sampled: Sequence[tuple[GenerationRequest, Completion]]

    @property
    def values(self) -> list[dict[str, Any]]:
        """Episodes as plain values, which can be compared: tensors are lists."""
        return [plain(asdict(each)) for each in self.played]


def prompt_stream(
    source: Any, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, held_out: int = 0, **rules: Any
) -> PromptStream:
    """Build the prompt stream of a source as a run does.

    Args:
        source: Prompt source or list of records.
        tokenizer: Tokenizer of the prompts.
        seed: Seed of the order.
        held_out: Number of prompts held out for evaluation.
        rules: Options of `RecordRules`.

    Returns:
        Stream with `prompt(position)`.
    """
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
    """Play episodes as a run does, with a scripted policy that writes `replies` or random characters.

    Args:
        environment: Environment with its options.
        tokenizer: Tokenizer of the policy.
        records: Prompts as returned by a source. Empty uses the empty tasks of a run without prompts.
        replies: Texts for the policy to write.
        num_prompts: Number of prompts to play.
        samples_per_prompt: Number of episodes per prompt.
        seed: Seed of tasks and policy.
        folder: Base folder of relative paths in the environment's options.

    Returns:
        Episodes sorted by sample id, and the requests with their completions.

    Raises:
        EpisodeError: An episode fails, as in a run.
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
        (stream.prompt(position), position * samples_per_prompt + k)
        for position in range(num_prompts)
        for k in range(samples_per_prompt)
    ]
    with closing(player):
        played = sorted(player.play(samples), key=lambda each: each.sample_id)
    return PlayedEpisodes(played, tuple(engine.sampled))
