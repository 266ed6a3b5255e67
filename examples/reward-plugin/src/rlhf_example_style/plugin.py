"""The entry point of `keyword-coverage`: imports pydantic and rlhf_core only, so that listing stays quick."""

from __future__ import annotations

from rlhf_core import Component

from .config import KeywordCoverageConfig

keyword_coverage = Component(
    summary="Share of the words listed with the prompt that occur in the answer.",
    config=KeywordCoverageConfig,
    build="rlhf_example_style.keyword_coverage:build",
)
