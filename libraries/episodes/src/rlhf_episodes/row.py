"""Tokens and conversation of one branch of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby
from typing import Any

from rlhf_core.rollout.row import Row
from rlhf_core.types import Message

from .contract import Tool


@dataclass(frozen=True, eq=False)
class PlacedImages:
    """A rendered text with the tokens of its images."""

    text: str
    inputs: Mapping[str, Any]
    """Columns of a prompt that consists of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A position in a row: the number of turns and messages before it."""

    num_turns: int
    num_messages: int
    last_message: Message | None


@dataclass(slots=True, kw_only=True)
class EpisodeRow(Row):
    """A row that can be forked into further branches."""

    tools: tuple[Tool, ...] = ()
    """Tools that the policy may call in this row."""
    conversation: list[Message] = field(default_factory=list)
    """All messages so far, replies included. Empty for plain text."""
    opening: PlacedImages | None = None
    """Images of the row's prompt. None if it is the prompt of the task, or the model does not see."""
    observed: dict[int, PlacedImages] = field(default_factory=dict)
    """Index in `turns` -> images of an observation."""

    @property
    def observed_parts(self) -> list[tuple[int, Mapping[str, Any]]]:
        """For each observation with images, the number of tokens before it, and the columns of its images."""
        starts = list(accumulate((len(turn.token_ids) for turn in self.turns), initial=len(self.prompt_ids)))
        return [(starts[place], placed.inputs) for place, placed in self.observed.items()]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    @property
    def num_own(self) -> int:
        """Number of response tokens that are not shared with an earlier branch."""
        return sum(len(turn.token_ids) for turn in self.turns[self.num_shared_turns :])

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, including shared ones."""
        return sum(len(each.token_ids) for _, each in self.sampled.values())

    @property
    def replies(self) -> list[tuple[int, ...]]:
        """Tokens of each reply. Adjacent turns form one reply, which was cut and continued."""
        runs = groupby(self.turns, key=lambda turn: turn.role)
        return [tuple(chain.from_iterable(turn.token_ids for turn in run)) for role, run in runs if role == "policy"]

    @property
    def last_sampled(self) -> tuple[int, ...]:
        """Tokens of the policy's last turn, or none before its first."""
        return next((turn.token_ids for turn in reversed(self.turns) if turn.role == "policy"), ())

    def add_reply(self, reply: Message) -> None:
        """Add the message of the last reply to the conversation. If it continues a cut reply, it replaces that one."""
        if len(self.turns) > 1 and self.turns[-2].role == "policy":
            self.conversation.pop()
        self.conversation.append(reply)

    @property
    def whole(self) -> str | list[Message]:
        """All messages so far, or the text of a row without messages."""
        if self.messages is not None:
            return list(self.conversation)
        return self.text + "".join(turn.text for turn in self.turns)

    @property
    def mark(self) -> Mark:
        """Position of the row's end."""
        return Mark(
            num_turns=len(self.turns),
            num_messages=len(self.conversation),
            last_message=self.conversation[-1] if self.conversation else None,
        )

    def fork(self, branch: int, at: Mark | None = None) -> EpisodeRow:
        """Return a branch that shares this row up to `at` (by default all of it). Shared turns belong to this row."""
        mark = at or self.mark
        last = () if mark.last_message is None else (mark.last_message,)
        return replace(
            self,
            branch=branch,
            conversation=[*self.conversation[: mark.num_messages - len(last)], *last],
            turns=self.turns[: mark.num_turns],
            sampled={place: each for place, each in self.sampled.items() if place < mark.num_turns},
            observed={place: each for place, each in self.observed.items() if place < mark.num_turns},
            num_shared_turns=mark.num_turns,
        )

    def roll_back(self, mark: Mark) -> None:
        """Remove everything after `mark`, which must not include a turn of the policy."""
        assert all(place < mark.num_turns for place in self.sampled)
        del self.turns[mark.num_turns :], self.conversation[mark.num_messages :]
        self.observed = {place: each for place, each in self.observed.items() if place < mark.num_turns}

    def drop_last_observation(self) -> None:
        """Remove the observation after the policy's last turn, which no reply followed."""
        if self.turns and self.turns[-1].role == "environment":
            self.turns.pop()
            self.observed.pop(len(self.turns), None)
