"""The entry point of `keyword-coverage`. Imports only pydantic and rlhf_core, so that listing stays fast."""

from __future__ import annotations

from rlhf_core import Component

from .config import KeywordCoverageConfig

keyword_coverage = Component(
    summary="Share of the prompt's listed words that occur in the answer.",
    config=KeywordCoverageConfig,
    build="rlhf_example_style.keyword_coverage:build",
)
