"""The script that displays a sample, shared by the pages of plugins."""

from __future__ import annotations

from importlib.resources import files


def sample_card_script() -> str:
    """Return the JavaScript of `SampleCard.make(sample)`, which makes an element and never treats text as markup."""
    return (files(__package__) / "sample_card.js").read_text(encoding="utf-8")
