"""Options of `keyword-coverage`."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config import Section


class KeywordCoverageConfig(Section):
    """Words that an answer should contain."""

    metadata_key: str = Field("keywords", min_length=1, description="Key of the record with the list of words.")
    case_sensitive: bool = Field(False, description="Distinguish uppercase and lowercase letters.")
    without_keywords: float = Field(0.0, ge=0, le=1, description="Score of an answer whose record does not list words.")
