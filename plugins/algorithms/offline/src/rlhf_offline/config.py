"""Options of the offline algorithms."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config import Section


class SFTConfig(Section):
    """Supervised fine-tuning on lines with `prompt` and `completion`, or with `messages`."""

    max_tokens: int = Field(
        1024, ge=2, description="Maximum tokens of prompt and completion together. Longer lines are skipped."
    )
    add_eos: bool = Field(True, description="Append the end-of-sequence token to each completion and train on it.")
    turns: Literal["all", "last"] = Field(
        "all", description="Assistant turns of a conversation (`messages`) to train on."
    )
    packing: bool = Field(
        False, description="Pack examples without padding, if the model supports it. Results are the same."
    )


class PairConfig(Section):
    """Options shared by algorithms on preference pairs: lines with `prompt`, `chosen` and `rejected`."""

    max_tokens: int = Field(
        1024, ge=2, description="Maximum tokens of prompt and answer together. Longer pairs are skipped."
    )


class AnswerPairConfig(PairConfig):
    """Options of algorithms that train a language model on pairs."""

    add_eos: bool = Field(True, description="Append the end-of-sequence token to each answer.")


class DPOConfig(AnswerPairConfig):
    """Direct preference optimization (Rafailov 2023) on lines with `prompt`, `chosen` and `rejected`."""

    beta: float = Field(0.1, gt=0, description="Strength of the regularization toward the reference.")
    loss: Literal["sigmoid", "ipo", "hinge", "robust", "nca", "apo-zero", "apo-down"] = Field(
        "sigmoid", description="Loss on the log-ratios of both answers to the reference."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Assumed share of wrong labels (losses sigmoid and robust)."
    )
    divergence: Literal["reverse-kl", "forward-kl", "jsd", "alpha"] = Field(
        "reverse-kl",
        description="Divergence that regularizes toward the reference (losses sigmoid, robust and hinge). forward-kl "
        "and alpha clamp an answer's log-ratio to [-20, 20] nats, outside which the gradient is 0.",
    )
    alpha: float = Field(0.5, gt=0, lt=1, description="For divergence alpha: near 0 as reverse-kl, near 1 forward-kl.")
    reference_free: bool = Field(False, description="Use log-probs of the policy alone, without a reference model.")

    @model_validator(mode="after")
    def _consistent(self) -> DPOConfig:
        if self.label_smoothing > 0 and self.loss not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing requires loss sigmoid or robust, not {self.loss}")
        if self.divergence != "reverse-kl" and self.loss not in ("sigmoid", "robust", "hinge"):
            raise ValueError(f"divergence {self.divergence} requires loss sigmoid, robust or hinge, not {self.loss}")
        if self.divergence != "reverse-kl" and self.reference_free:
            raise ValueError(f"divergence {self.divergence} requires a reference: set reference_free: false")
        return self


class KTOConfig(AnswerPairConfig):
    """KTO (Ethayarajh 2024) on lines with `prompt`, `completion` and `label`, or with `chosen` and `rejected`."""

    beta: float = Field(0.1, gt=0, description="How fast the value of an answer saturates with its log-ratio.")
    desirable_weight: float = Field(1.0, gt=0, description="Weight of the losses of good answers.")
    undesirable_weight: float = Field(1.0, gt=0, description="Weight of the losses of bad answers.")


class ORPOConfig(AnswerPairConfig):
    """ORPO (Hong 2024) on lines with `prompt`, `chosen` and `rejected`, without a reference model."""

    odds_coef: float = Field(0.1, gt=0, description="Weight of the odds ratio relative to the likelihood term.")


class SimPOConfig(AnswerPairConfig):
    """SimPO (Meng 2024) on lines with `prompt`, `chosen` and `rejected`, without a reference model."""

    beta: float = Field(2.0, gt=0, description="Scale of an answer's reward, its mean log-prob per token.")
    gamma: float = Field(1.0, ge=0, description="Target margin of the chosen answer's reward over the rejected one's.")


class ProcessRewardModelConfig(Section):
    """Process reward model (Lightman 2023) on lines with `prompt`, `steps` and `labels`."""

    max_tokens: int = Field(
        1024, ge=2, description="Maximum tokens of prompt and answer together. Longer lines are skipped."
    )
    step_separator: str = Field(
        "\n", description="Text appended to each step. The score is read at its last token. May be empty."
    )


class RewardModelConfig(PairConfig):
    """Reward model (Bradley-Terry) on lines with `prompt`, `chosen` and `rejected`."""

    use_margin: bool = Field(False, description="Use each line's `margin` as the target margin of the chosen answer.")
    centring_coef: float = Field(0.0, ge=0, description="Weight of the squared sum of both scores (keeps them near 0).")

    @property
    def add_eos(self) -> bool:
        """True, because the score is read at the end-of-sequence token."""
        return True
