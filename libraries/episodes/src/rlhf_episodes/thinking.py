"""How models mark their thoughts: one table for chat templates, tool calls and histories."""

from __future__ import annotations

MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|channel>thought", "<channel|>"),  # gemma4
)
"""Beginnings and ends of thoughts, as text or special tokens. Harmony is parsed instead (`response_templates.py`)."""


def markers_of(model: str) -> tuple[str, str]:
    """The markers of a model, given its chat template and tokens as one text. Defaults to the first pair."""
    return next((pair for pair in MARKERS if pair[1] in model), MARKERS[0])


def split_thought(text: str) -> tuple[str, str]:
    """Split a reply into its first thought, with the markers, and what follows.

    The first marker may be missing, since some prompts end with it. A thought without an end is the whole reply.
    """
    begun = [end for begin, end in MARKERS if text.lstrip().startswith(begin)]
    end = next((end for end in begun or dict(MARKERS).values() if end in text), None)
    if end is None:
        return (text, "") if begun else ("", text)
    place = text.index(end) + len(end)
    return text[:place], text[place:]
