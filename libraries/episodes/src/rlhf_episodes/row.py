"""The tokens of one branch of an environment's episode, with its conversation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, groupby

from rlhf_core.rollout.row import Row
from rlhf_core.types import Message

from .contract import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in a row: so much of it stood there."""

    num_turns: int
    num_messages: int
    last_message: Message | None


@dataclass(slots=True, kw_only=True)
class EpisodeRow(Row):
    """A row that may branch off another one."""

    tools: tuple[Tool, ...] = ()
    """Tools that the policy may call here."""
    conversation: list[Message] = field(default_factory=list)
    """All messages so far, the replies among them; stays empty for plain text."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    @property
    def num_own(self) -> int:
        """Tokens of the response that stand in no other branch before."""
        return sum(len(turn.token_ids) for turn in self.turns[self.num_shared_turns :])

    @property
    def num_sampled(self) -> int:
        """Sampled tokens, shared ones included."""
        return sum(len(each.token_ids) for _, each in self.sampled.values())

    @property
    def replies(self) -> list[tuple[int, ...]]:
        """The tokens of the policy's replies: turns with nothing between them are one, cut and continued."""
        runs = groupby(self.turns, key=lambda turn: turn.role)
        return [tuple(chain.from_iterable(turn.token_ids for turn in run)) for role, run in runs if role == "policy"]

    @property
    def last_sampled(self) -> tuple[int, ...]:
        """The tokens of the policy's newest turn; none before the first."""
        return next((turn.token_ids for turn in reversed(self.turns) if turn.role == "policy"), ())

    def say(self, reply: Message) -> None:
        """Add the message of the last of `replies` to the conversation; one that continues a cut turn replaces it."""
        if len(self.turns) > 1 and self.turns[-2].role == "policy":
            self.conversation.pop()
        self.conversation.append(reply)

    @property
    def mark(self) -> Mark:
        return Mark(
            num_turns=len(self.turns),
            num_messages=len(self.conversation),
            last_message=self.conversation[-1] if self.conversation else None,
        )

    def fork(self, branch: int, at: Mark | None = None) -> EpisodeRow:
        """A branch that begins with what stood here at a place, or with all; it counts in this one alone."""
        mark = at or self.mark
        last = () if mark.last_message is None else (mark.last_message,)
        return replace(
            self,
            branch=branch,
            conversation=[*self.conversation[: mark.num_messages - len(last)], *last],
            turns=self.turns[: mark.num_turns],
            sampled={place: each for place, each in self.sampled.items() if place < mark.num_turns},
            num_shared_turns=mark.num_turns,
        )

    def take_back(self, mark: Mark) -> None:
        """Forget what was given since then; the policy has answered none of it."""
        assert all(place < mark.num_turns for place in self.sampled)
        del self.turns[mark.num_turns :], self.conversation[mark.num_messages :]

    def drop_last_observation(self) -> None:
        """Take back what was given after the policy's last turn: nobody answered it."""
        if self.turns and self.turns[-1].role == "environment":
            self.turns.pop()
