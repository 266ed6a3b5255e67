"""`conversation`: the user's turns come from the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config import ConversationConfig


class Conversation:
    """Plays the prompt's later user turns in order, independent of the policy's replies.

    It ends with the reply to the last turn. The reward is 0: use `rewards` to judge the rollout.
    """

    def __init__(self, *, turns_key: str = "turns") -> None:
        self._key = turns_key

    def reset(self, task: Any) -> None:
        """Read the prompt's turns. Raises `ValueError` if they are not texts, messages or lists of messages."""
        turns = task.prompt.metadata.get(self._key)
        if isinstance(turns, str | Mapping) or not isinstance(turns, Sequence) or not all(map(_is_turn, turns)):
            raise ValueError(
                f"metadata {self._key!r} of prompt {task.prompt.position} is {turns!r:.80}, not a list of user turns "
                "(texts or chat messages): add it to the record, or set another key with environment.turns_key"
            )
        self._turns = [[turn] if isinstance(turn, Mapping) else turn for turn in turns]

    def step(self, reply: Any) -> tuple[Any, float, bool]:
        """Return the next turn, or end the episode."""
        return (self._turns.pop(0), 0.0, False) if self._turns else (None, 0.0, True)

    def state(self) -> int:
        """Return the number of turns left."""
        return len(self._turns)

    def restore(self, task: Any, state: int) -> None:
        """Continue a conversation with the last `state` turns of its prompt."""
        self.reset(task)
        del self._turns[: len(self._turns) - state]


def _is_turn(turn: object) -> bool:
    if isinstance(turn, str):
        return bool(turn)
    messages = [turn] if isinstance(turn, Mapping) else turn
    return (
        isinstance(messages, Sequence)
        and bool(messages)
        and all(isinstance(each, Mapping) and "role" in each and "content" in each for each in messages)
    )


def build(config: ConversationConfig, context: object) -> Conversation:
    """Build the environment of one episode."""
    return Conversation(turns_key=config.turns_key)
