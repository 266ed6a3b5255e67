"""Continues an episode whose context is full in a new branch, with a conversation that its environment shortens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, cast

from .contract import Messages, Options, Policy, Reply, Tool

Compaction = Literal["ask", "restart"] | None
"""`ask` raises `ContextFull` if a whole turn no longer fits. `restart` replaces the conversation by the messages."""
Compact = Callable[[Messages], Awaitable[Messages]]
"""Returns a shorter conversation: text for text, messages for messages."""


class ContextFull(Exception):
    """A whole turn no longer fits into the context. The argument is the conversation, new messages included."""

    @property
    def messages(self) -> Messages:
        """The conversation."""
        return cast("Messages", self.args[0])


class CompactingPolicy(Policy, Protocol):
    """The policy in a branch that may be compacted."""

    async def turn(
        self,
        messages: Messages = None,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        options: Options = None,
        compaction: Compaction = None,
    ) -> Reply: ...


async def next_turn(policy: Policy, messages: Messages, tools: Sequence[Tool], compact: Compact | None) -> Reply:
    """Sample a turn, in a new branch with a shorter conversation if the context is full.

    Args:
        policy: The policy in the branch to continue.
        messages: Messages since the last turn.
        tools: Tools that the policy may call.
        compact: Shortens a conversation. None ends the episode at the limit instead.

    Raises:
        EpisodeTruncated: No turn or token is left, also after the conversation was shortened.
    """
    if compact is None:
        return await policy.turn(messages, tools)
    limited = cast("CompactingPolicy", policy)
    try:
        return await limited.turn(messages, tools, compaction="ask")
    except ContextFull as full:
        shorter = await compact(full.messages)
    return await limited.turn(shorter, tools, compaction="restart")
