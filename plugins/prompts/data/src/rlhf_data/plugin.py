"""The prompt source of this distribution, as its entry point declares it."""

from __future__ import annotations

from rlhf_core import Component

from .config import SortDigitsConfig

sort_digits = Component(
    summary="Made in code: sort the digits of a number (the quickstart's task).",
    config=SortDigitsConfig,
    build="rlhf_data.sort_digits:build",
)
