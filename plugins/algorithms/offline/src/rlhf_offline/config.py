"""Options of the offline algorithms."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config import Section


class SFTConfig(Section):
    """Supervised fine-tuning on lines with `prompt` and `completion`, or with `messages`."""

    max_tokens: int = Field(
        1024, ge=2, description="Longest prompt and completion together, in tokens; longer is skipped."
    )
    add_eos: bool = Field(True, description="Teach the end-of-sequence token after each completion.")
    turns: Literal["all", "last"] = Field(
        "all", description="Which assistant turns of a conversation (`messages`) are learnt."
    )
    packing: bool = Field(
        False, description="Put several examples into one row of max_tokens, apart from each other. Results agree."
    )


class PairConfig(Section):
    """Options shared by algorithms on preference pairs: lines with `prompt`, `chosen` and `rejected`."""

    max_tokens: int = Field(
        1024, ge=2, description="Longest prompt and answer together, in tokens; longer pairs are skipped."
    )


class DPOConfig(PairConfig):
    """Direct preference optimisation (Rafailov 2023) on lines with `prompt`, `chosen` and `rejected`."""

    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference.")
    loss: Literal["sigmoid", "ipo", "hinge"] = Field("sigmoid", description="Loss of a pair's difference.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of labels taken to be wrong (conservative DPO; loss sigmoid only)."
    )
    reference_free: bool = Field(False, description="Compare the policy with nothing; builds no reference model.")
    add_eos: bool = Field(True, description="Count the end-of-sequence token as part of each answer.")

    @model_validator(mode="after")
    def _consistent(self) -> DPOConfig:
        if self.label_smoothing > 0 and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing is for loss sigmoid, not {self.loss}")
        return self


class RewardModelConfig(PairConfig):
    """Reward model (Bradley-Terry) on lines with `prompt`, `chosen` and `rejected`."""

    use_margin: bool = Field(False, description="Each line's `margin` says by how much its chosen answer should win.")
    centring_coef: float = Field(0.0, ge=0, description="Factor of the squared sum of both scores: keeps them near 0.")
