"""`conversation`: the user's turns are written beforehand, in the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config import ConversationConfig


class Conversation:
    """The prompt, then the prompt's later turns one after another, whatever the policy says.

    It ends with the policy's answer to the last turn and gives no reward of its own: `rewards` judge the rollout.
    """

    def __init__(self, *, turns_key: str = "turns") -> None:
        self._key = turns_key

    def reset(self, task: Any) -> None:
        """Raises `ValueError` where the prompt's turns are no list of texts, messages, or lists of messages."""
        turns = task.prompt.metadata.get(self._key)
        if isinstance(turns, str | Mapping) or not isinstance(turns, Sequence) or not all(map(_is_turn, turns)):
            raise ValueError(
                f"metadata {self._key!r} of prompt {task.prompt.position} is {turns!r:.80}, not a list of user turns "
                "(texts, or chat messages): add it to the line, or name another key with environment.turns_key"
            )
        self._coming = [[turn] if isinstance(turn, Mapping) else turn for turn in turns]

    def step(self, reply: Any) -> tuple[Any, float, bool]:
        """The next turn, or the end."""
        return (self._coming.pop(0), 0.0, False) if self._coming else (None, 0.0, True)


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
    """A conversation for one episode."""
    return Conversation(turns_key=config.turns_key)
