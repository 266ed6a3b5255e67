"""A teacher, and a sample as a teacher sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.types import BufferItem, Role

from .contexts import TeacherPrompts
from .server import TeacherServer


@dataclass(frozen=True, slots=True)
class Teacher:
    """One teacher, as the pass uses it."""

    where: str
    """Place of its options, for errors."""
    source: Role | TeacherServer
    """Role of its model, or its server."""
    prompts: TeacherPrompts | None = None
    """Encodes its prompts. None if it sees the policy's tokens."""
    tokenizers: tuple[Any, Any] | None = None
    """The policy's tokenizer and its own. None if they are the same."""


@dataclass(frozen=True, slots=True)
class Question:
    """A sample, as one teacher sees it."""

    index: int
    item: BufferItem
    spans: Sequence[int] | None = None
    ranges: Sequence[tuple[int, int]] = ()
