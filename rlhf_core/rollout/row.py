"""The answer to a sample: its rows of tokens, as they were sampled and as they were given.

Sampled ids stay as they are: nothing here is decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ..columns import Columns
from ..types import Completion, FinishReason, Message, Prompt, ToolCall, Turn


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
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """Whether each token of the response was sampled; given tokens are read, and not trained on."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Policy version of each token of the response, -1 for given ones."""
    support: list[Sequence[int]] = field(default_factory=list)
    """For each token of the response, the ids that truncated sampling chose from; empty for given tokens."""
    truncates: bool = False
    """Whether any token was sampled from less than the whole vocabulary."""
    turns: list[Turn] = field(default_factory=list)
    own_turns: dict[int, int] = field(default_factory=dict)
    """Number of each turn of the sample that was sampled in this row -> index in `turns`."""
    shared_turns: dict[int, int] = field(default_factory=dict)
    """The same for turns that an earlier row of the sample trains on."""
    num_sampled: int = 0
    """Sampled tokens, shared ones included."""
    policy_version: int | None = None
    """The oldest of all sampled tokens."""
    finish_reason: FinishReason = "stop"
    columns: Columns = field(default_factory=Columns)
    """Columns of the row, which its section declares."""
    sampled_columns: list[tuple[int, Columns]] = field(default_factory=list)
    """Of each turn sampled here that has columns of the engine: tokens of the response before it, and the columns."""

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and response."""
        return (*self.prompt_ids, *self.ids)

    @property
    def turn_ends(self) -> dict[int, int]:
        """Number of each of `own_turns` -> index in `ids` of its last token."""
        ends = list(accumulate(len(turn.token_ids) for turn in self.turns))
        return {number: ends[place] - 1 for number, place in self.own_turns.items()}

    @property
    def turn_numbers(self) -> list[int]:
        """The numbers of the policy's turns, in the order of the row."""
        places = self.shared_turns | self.own_turns
        return sorted(places, key=lambda number: places[number])

    def give(self, token_ids: Sequence[int], text: str) -> None:
        """Add tokens that the policy reads and that are not trained on."""
        zeros = [0.0] * len(token_ids)
        self.ids += token_ids
        self.mask += [False] * len(token_ids)
        self.logprobs += zeros
        self.versions += [-1] * len(token_ids)
        self.support += [()] * len(token_ids)
        self.turns.append(Turn(role="environment", text=text, token_ids=tuple(token_ids), logprobs=tuple(zeros)))

    def sample(self, completion: Completion, text: str, tool_calls: tuple[ToolCall, ...] = (), number: int = 0) -> None:
        """Add turn `number` of the sample, which the policy sampled."""
        count = len(completion.token_ids)
        if isinstance(completion.columns, Columns):
            self.sampled_columns.append((len(self.ids), completion.columns))
        self.ids += completion.token_ids
        self.mask += [True] * count
        self.logprobs += completion.logprobs
        self.truncates = self.truncates or completion.support_ids is not None
        self.support += completion.support_ids if completion.support_ids is not None else [()] * count
        self.num_sampled += count
        self.own_turns[number] = len(self.turns)
        versions = completion.policy_versions or (completion.policy_version,) * count
        self.versions += versions
        self.policy_version = min(versions) if self.policy_version is None else min(self.policy_version, *versions)
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
