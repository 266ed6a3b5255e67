"""The tokens of one branch of an episode, as they were sampled and as they were given.

Sampled ids stay as they are for ever: nothing here is decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby

from ..types import Completion, FinishReason, Message, ToolCall, Turn
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
class Row:
    """A prompt, and a response that grows turn by turn."""

    branch: int
    text: str
    """Text of the prompt."""
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None
    """The prompt's; None for plain text."""
    tools: tuple[Tool, ...] = ()
    """Tools that the policy may call here."""
    conversation: list[Message] = field(default_factory=list)
    """All messages so far, the replies among them; stays empty for plain text."""
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Policy version of each token of the response, -1 for given ones."""
    support: list[Sequence[int]] = field(default_factory=list)
    """For each token of the response, the ids that truncated sampling chose from; empty for given tokens."""
    truncates: bool = False
    """Whether any token was sampled from less than the whole vocabulary."""
    turns: list[Turn] = field(default_factory=list)
    own_turns: dict[int, int] = field(default_factory=dict)
    """Number of a turn of the episode that was sampled here -> index in `turns`."""
    shared_turns: dict[int, int] = field(default_factory=dict)
    """The same of turns that stand in the branch this one came from."""
    num_sampled: int = 0
    """Tokens sampled in this branch, those it shares with the branch it came from included."""
    num_shared: int = 0
    """Tokens of the response that stand in the branch this one came from."""
    policy_version: int | None = None
    """The oldest of all sampled tokens."""
    finish_reason: FinishReason = "stop"

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and response."""
        return (*self.prompt_ids, *self.ids)

    @property
    def num_own(self) -> int:
        """Tokens of the response that stand in no other branch before."""
        return len(self.ids) - self.num_shared

    @property
    def turn_ends(self) -> dict[int, int]:
        """Number of each of `own_turns` -> index in `ids` of its last token."""
        ends = list(accumulate(len(turn.token_ids) for turn in self.turns))
        return {number: ends[place] - 1 for number, place in self.own_turns.items()}

    @property
    def turn_numbers(self) -> list[int]:
        """The numbers of the policy's turns, as they stand in the row."""
        places = self.shared_turns | self.own_turns
        return sorted(places, key=lambda number: places[number])

    @property
    def replies(self) -> list[tuple[int, ...]]:
        """The tokens of the policy's replies: turns with nothing between them are one, cut and continued."""
        runs = groupby(self.turns, key=lambda turn: turn.role)
        return [tuple(chain.from_iterable(turn.token_ids for turn in run)) for role, run in runs if role == "policy"]

    @property
    def last_sampled(self) -> tuple[int, ...]:
        """The tokens of the policy's newest turn; none before the first."""
        return next((turn.token_ids for turn in reversed(self.turns) if turn.role == "policy"), ())

    def give(self, token_ids: Sequence[int], text: str) -> None:
        """Add what the environment says: it is read, and not learnt."""
        zeros = [0.0] * len(token_ids)
        self.ids += token_ids
        self.mask += [False] * len(token_ids)
        self.logprobs += zeros
        self.versions += [-1] * len(token_ids)
        self.support += [()] * len(token_ids)
        self.turns.append(Turn(role="environment", text=text, token_ids=tuple(token_ids), logprobs=tuple(zeros)))

    def sample(self, completion: Completion, text: str, tool_calls: tuple[ToolCall, ...], number: int) -> None:
        """Add turn `number` of the episode, which the policy sampled."""
        count = len(completion.token_ids)
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

    def fork(self, branch: int, at: Mark | None = None) -> Row:
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
