"""The script with which pages of plugins show a sample, the same in each of them."""

from __future__ import annotations

from importlib.resources import files


def sample_card_script() -> str:
    """JavaScript that makes an element of a sample, its text never as markup: `SampleCard.make(sample)`."""
    return (files(__package__) / "sample_card.js").read_text(encoding="utf-8")
