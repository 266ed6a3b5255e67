"""Options of the offline algorithms."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config import Section


class SFTConfig(Section):
    """Supervised fine-tuning on lines with `prompt` and `completion`."""

    max_tokens: int = Field(
        1024, ge=2, description="Longest prompt and completion together, in tokens; longer is skipped."
    )
    add_eos: bool = Field(True, description="Teach the end-of-sequence token after each completion.")
