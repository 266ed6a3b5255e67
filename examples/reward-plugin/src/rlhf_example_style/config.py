"""Options of `keyword-coverage`."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config import Section


class KeywordCoverageConfig(Section):
    """Which words an answer should have."""

    metadata_key: str = Field("keywords", min_length=1, description="Key of the prompt's line that lists the words.")
    case_sensitive: bool = Field(False, description="Tell capitals from small letters.")
    without_keywords: float = Field(0.0, ge=0, le=1, description="Score of an answer whose line lists no words.")
