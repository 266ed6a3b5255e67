"""The answer to a sample: its rows of tokens, as they were sampled and as they were given.

Sampled ids stay as they are: nothing here is decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from ..columns import Columns
from ..types import Completion, FinishReason, Message, Prompt, ToolCall, Turn

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Row:
    """A prompt, and a response that grows turn by turn."""

    branch: int = 0
    """Number of the row among those of its sample."""
    text: str
    """Text of the prompt."""
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    """The prompt's; None for plain text."""
    turns: list[Turn] = field(default_factory=list)
    sampled: dict[int, tuple[int, Completion]] = field(default_factory=dict)
    """Index in `turns` -> number of the turn in the sample, and what the engine returned; of the policy's turns."""
    num_shared_turns: int = 0
    """That many turns, the first ones, stand in an earlier row of the sample, which trains on them."""
    finish_reason: FinishReason = "stop"
    columns: Columns = field(default_factory=Columns)
    """Columns of the row, which its section declares."""

    @property
    def ids(self) -> list[int]:
        """Tokens of the response."""
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and response."""
        return (*self.prompt_ids, *self.ids)

    @property
    def own_completions(self) -> dict[int, Completion]:
        """Index in `turns` -> what the engine returned for a turn that was sampled in this row."""
        return {place: each for place, (_, each) in self.sampled.items() if place >= self.num_shared_turns}

    @property
    def own_turns(self) -> dict[int, int]:
        """Number of each turn of the sample that was sampled in this row -> index in `turns`."""
        return {self.sampled[place][0]: place for place in self.own_completions}

    @property
    def turn_ends(self) -> dict[int, int]:
        """Number of each of `own_turns` -> index in `ids` of its last token."""
        ends = list(accumulate(len(turn.token_ids) for turn in self.turns))
        return {number: ends[place] - 1 for number, place in self.own_turns.items()}

    def per_token(self, given: T, sampled: Callable[[Completion], Sequence[T]]) -> list[T]:
        """A value for each token of the response: `sampled` of what was sampled in this row, `given` of all else."""
        values: list[T] = []
        own = self.own_completions
        for place, turn in enumerate(self.turns):
            values += sampled(own[place]) if place in own else [given] * len(turn.token_ids)
        return values

    @property
    def mask(self) -> list[bool]:
        """Whether each token of the response was sampled; given tokens are read, and not trained on."""
        return self.per_token(False, lambda each: [True] * len(each.token_ids))

    @property
    def logprobs(self) -> list[float]:
        """Of each token of the response, 0 where it was not sampled in this row."""
        return self.per_token(0.0, lambda each: each.logprobs)

    def give(self, token_ids: Sequence[int], text: str) -> None:
        """Add tokens that the policy reads and that are not trained on."""
        zeros = (0.0,) * len(token_ids)
        self.turns.append(Turn(role="environment", text=text, token_ids=tuple(token_ids), logprobs=zeros))

    def sample(self, completion: Completion, text: str, tool_calls: tuple[ToolCall, ...] = (), number: int = 0) -> None:
        """Add turn `number` of the sample, which the policy sampled."""
        self.sampled[len(self.turns)] = number, completion
        self.finish_reason = completion.finish_reason
        self.turns.append(
            Turn(
                role="policy",
                text=text,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                tool_calls=tool_calls,
            )
        )


@dataclass(frozen=True, slots=True)
class Played:
    """The finished answer to a sample."""

    prompt: Prompt
    sample_id: int
    rows: tuple[Row, ...]
    """By branch; empty if the sample is left out."""
    reward: float | None = None
    """Raw reward of the environment, those of its turns included; None without an environment."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Number of a turn -> its part of `reward`."""
