"""The answer to a sample, as rows of sampled tokens and observations.

Sampled ids are kept unchanged: nothing here is decoded and encoded again.
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
    """Index of the row in its sample."""
    text: str
    """Text of the prompt."""
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    """Chat messages of the prompt. None for plain text."""
    turns: list[Turn] = field(default_factory=list)
    sampled: dict[int, tuple[int, Completion]] = field(default_factory=dict)
    """Index in `turns` -> number of the turn in the sample, and the engine's completion. Only for policy turns."""
    num_shared_turns: int = 0
    """Number of first turns that an earlier row of the sample contains too, and that only count there."""
    finish_reason: FinishReason = "stop"
    columns: Columns = field(default_factory=Columns)
    """Columns of the row, declared by its section, and values that replace those of columns of its prompt."""

    @property
    def ids(self) -> list[int]:
        """Token ids of the response."""
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def sequence(self) -> tuple[int, ...]:
        """Token ids of prompt and response."""
        return (*self.prompt_ids, *self.ids)

    @property
    def own_completions(self) -> dict[int, Completion]:
        """Index in `turns` -> the engine's completion, for turns that were sampled in this row."""
        return {place: each for place, (_, each) in self.sampled.items() if place >= self.num_shared_turns}

    @property
    def own_turns(self) -> dict[int, int]:
        """Number in the sample -> index in `turns`, for turns that were sampled in this row."""
        return {self.sampled[place][0]: place for place in self.own_completions}

    @property
    def turn_ends(self) -> dict[int, int]:
        """Number in the sample -> index in `ids` of the last token, for turns that were sampled in this row."""
        ends = list(accumulate(len(turn.token_ids) for turn in self.turns))
        return {number: ends[place] - 1 for number, place in self.own_turns.items()}

    def per_token(self, default: T, sampled: Callable[[Completion], Sequence[T]]) -> list[T]:
        """Return one value per response token: from `sampled(completion)` if sampled in this row, else `default`."""
        values: list[T] = []
        own = self.own_completions
        for place, turn in enumerate(self.turns):
            values += sampled(own[place]) if place in own else [default] * len(turn.token_ids)
        return values

    @property
    def mask(self) -> list[bool]:
        """Whether each response token was sampled in this row. Other tokens are not trained on."""
        return self.per_token(False, lambda each: [True] * len(each.token_ids))

    @property
    def logprobs(self) -> list[float]:
        """Log-prob of each response token in nats, 0 if it was not sampled in this row."""
        return self.per_token(0.0, lambda each: each.logprobs)

    def give(self, token_ids: Sequence[int], text: str) -> None:
        """Append a turn of the environment, which the policy reads and which is not trained on."""
        zeros = (0.0,) * len(token_ids)
        self.turns.append(Turn(role="environment", text=text, token_ids=tuple(token_ids), logprobs=zeros))

    def sample(self, completion: Completion, text: str, tool_calls: tuple[ToolCall, ...] = (), number: int = 0) -> None:
        """Append turn `number` of the sample, which the policy sampled."""
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
    """Sorted by branch. Empty if the sample is dropped."""
    reward: float | None = None
    """Raw reward of the environment, including the rewards of turns. None without an environment."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Number of the turn in the sample -> its part of `reward`."""
