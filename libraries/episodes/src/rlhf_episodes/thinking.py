"""Markers of thoughts in replies, shared by chat templates, tool calls and histories."""

from __future__ import annotations

MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|channel>thought", "<channel|>"),  # gemma4
    ("<think:opensource>", "</think:opensource>"),  # Hy3
)
"""Start and end markers of thoughts: text or special tokens. Harmony replies are parsed in `response_templates.py`."""


def markers_of(model: str) -> tuple[str, str]:
    """Return a model's markers, given its chat template and tokens as one text. Defaults to the first pair.

    Example:
        >>> markers_of("{% if thinking %}[THINK]{{ thought }}[/THINK]{% endif %}")
        ('[THINK]', '[/THINK]')
    """
    return next((pair for pair in MARKERS if pair[1] in model), MARKERS[0])


def split_thought(text: str) -> tuple[str, str]:
    """Split a reply into its first thought, including the markers, and the rest.

    The start marker may be missing, since some prompts end with it. A thought without an end is the whole reply.

    Example:
        >>> split_thought("<think>2 + 2 = 4</think>Four.")
        ('<think>2 + 2 = 4</think>', 'Four.')
    """
    expected_ends = [end for begin, end in MARKERS if text.lstrip().startswith(begin)]
    end = next((end for end in expected_ends or dict(MARKERS).values() if end in text), None)
    if end is None:
        return (text, "") if expected_ends else ("", text)
    place = text.index(end) + len(end)
    return text[:place], text[place:]
