"""The reward keeps the contract of rewards, with a local judge that can judge nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_testing.contracts import RewardContract
from rlhf_testing.models import tiny_model, tiny_tokenizer


class TestJudge(RewardContract):
    plugin = "judge"

    @classmethod
    def make_options(cls, folder: Path) -> Mapping[str, Any]:
        model = tiny_model()
        model.config.max_position_embeddings = 8192
        model.save_pretrained(folder / "judge")
        tiny_tokenizer().save_pretrained(folder / "judge")
        judge = {"model_path": str(folder / "judge"), "max_reply_tokens": 8}
        return {"rubric": "be right", "unreadable": "lowest", "asked_again": 0, **judge}
