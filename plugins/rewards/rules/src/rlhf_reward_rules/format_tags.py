"""`format-tags`: whether the answer consists of tags, such as <think>…</think><answer>…</answer>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def format_tags(
    rollouts: Sequence[Any], *, tags: Sequence[str] = ("think", "answer"), allow_outside: bool = False
) -> list[float]:
    """1 if each tag opens and closes exactly once, in order, not nested and not empty, else 0.

    Args:
        rollouts: samples to score.
        tags: names of the tags.
        allow_outside: allow text between, before and after the tags, not only white space.

    Example:
        >>> from types import SimpleNamespace
        >>> format_tags([SimpleNamespace(completion="<think>1 + 1</think> <answer>2</answer>")])
        [1.0]
    """
    if isinstance(tags, str) or not tags:
        raise ValueError(f"tags must be a list of names, got {tags!r}")
    return [float(_well_formed(rollout.completion, tags, allow_outside)) for rollout in rollouts]


def _well_formed(text: str, tags: Sequence[str], allow_outside: bool) -> bool:
    rest = text
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        before, opened, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if not (opened and closed and inside.strip()) or _has_other_tag(inside, tag, tags):
            return False
        if before.strip() and not allow_outside:
            return False
    return allow_outside or not rest.strip()


def _has_other_tag(inside: str, tag: str, tags: Sequence[str]) -> bool:
    return any(f"<{other}>" in inside or f"</{other}>" in inside for other in tags if other != tag)
