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

    num_ids: int
    num_turns: int
    num_messages: int
    last_message: Message | None
    num_sampled: int
    policy_version: int | None


@dataclass(slots=True, kw_only=True)
class EpisodeRow(Row):
    """A row that may branch off another one."""

    tools: tuple[Tool, ...] = ()
    """Tools that the policy may call here."""
    conversation: list[Message] = field(default_factory=list)
    """All messages so far, the replies among them; stays empty for plain text."""
    num_shared: int = 0
    """Tokens of the response that another branch already has."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    @property
    def num_own(self) -> int:
        """Tokens of the response that stand in no other branch before."""
        return len(self.ids) - self.num_shared

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
            num_ids=len(self.ids),
            num_turns=len(self.turns),
            num_messages=len(self.conversation),
            last_message=self.conversation[-1] if self.conversation else None,
            num_sampled=self.num_sampled,
            policy_version=self.policy_version,
        )

    def fork(self, branch: int, at: Mark | None = None) -> EpisodeRow:
        """A branch that begins with what stood here at a place, or with all; it counts in this one alone."""
        mark = at or self.mark
        last = () if mark.last_message is None else (mark.last_message,)
        return replace(
            self,
            branch=branch,
            conversation=[*self.conversation[: mark.num_messages - len(last)], *last],
            ids=self.ids[: mark.num_ids],
            mask=[False] * mark.num_ids,
            logprobs=[0.0] * mark.num_ids,
            versions=[-1] * mark.num_ids,
            support=[()] * mark.num_ids,
            turns=self.turns[: mark.num_turns],
            sampled_columns=[],
            own_turns={},
            shared_turns={
                number: place
                for number, place in (self.shared_turns | self.own_turns).items()
                if place < mark.num_turns
            },
            num_sampled=mark.num_sampled,
            num_shared=mark.num_ids,
            policy_version=mark.policy_version,
        )

    def take_back(self, mark: Mark) -> None:
        """Forget what was given since then; the policy has answered none of it."""
        assert mark.num_sampled == self.num_sampled
        del self.turns[mark.num_turns :], self.conversation[mark.num_messages :]
        self._cut(mark.num_ids)

    def drop_last_observation(self) -> None:
        """Take back what was given after the policy's last turn: nobody answered it."""
        if self.turns and self.turns[-1].role == "environment":
            self._cut(len(self.ids) - len(self.turns.pop().token_ids))

    def _cut(self, num_ids: int) -> None:
        for column in (self.ids, self.mask, self.logprobs, self.versions, self.support):
            del column[num_ids:]
