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
        False, description="Leave out the padding between examples, where the model can run so. Results agree."
    )


class PairConfig(Section):
    """Options shared by algorithms on preference pairs: lines with `prompt`, `chosen` and `rejected`."""

    max_tokens: int = Field(
        1024, ge=2, description="Longest prompt and answer together, in tokens; longer pairs are skipped."
    )


class AnswerPairConfig(PairConfig):
    """Options of algorithms that train a language model on pairs."""

    add_eos: bool = Field(True, description="Count the end-of-sequence token as part of each answer.")


class DPOConfig(AnswerPairConfig):
    """Direct preference optimisation (Rafailov 2023) on lines with `prompt`, `chosen` and `rejected`."""

    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference.")
    loss: Literal["sigmoid", "ipo", "hinge", "robust", "nca", "apo-zero", "apo-down"] = Field(
        "sigmoid", description="What is asked of the two log-ratios to the reference."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of labels taken to be wrong (losses sigmoid and robust)."
    )
    divergence: Literal["reverse-kl", "forward-kl", "jsd", "alpha"] = Field(
        "reverse-kl",
        description="What holds the policy to the reference (losses sigmoid, robust and hinge). forward-kl and alpha "
        "clamp an answer's log-ratio to 20 nats either way: beyond, it has no gradient.",
    )
    alpha: float = Field(0.5, gt=0, lt=1, description="Of divergence alpha: near 0 reverse-kl, near 1 forward-kl.")
    reference_free: bool = Field(False, description="Compare the policy with nothing; builds no reference model.")

    @model_validator(mode="after")
    def _consistent(self) -> DPOConfig:
        if self.label_smoothing > 0 and self.loss not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing is for loss sigmoid or robust, not {self.loss}")
        if self.divergence != "reverse-kl" and self.loss not in ("sigmoid", "robust", "hinge"):
            raise ValueError(f"divergence {self.divergence} is for loss sigmoid, robust or hinge, not {self.loss}")
        if self.divergence != "reverse-kl" and self.reference_free:
            raise ValueError(f"divergence {self.divergence} is from the reference: set reference_free: false")
        return self


class KTOConfig(AnswerPairConfig):
    """KTO (Ethayarajh 2024) on lines with `prompt`, `completion` and `label`, or with `chosen` and `rejected`."""

    beta: float = Field(0.1, gt=0, description="How fast the worth of an answer saturates with its log-ratio.")
    desirable_weight: float = Field(1.0, gt=0, description="Factor of good answers' losses.")
    undesirable_weight: float = Field(1.0, gt=0, description="Factor of bad answers' losses.")


class ORPOConfig(AnswerPairConfig):
    """ORPO (Hong 2024) on lines with `prompt`, `chosen` and `rejected`; no reference model."""

    odds_coef: float = Field(0.1, gt=0, description="Factor of the odds ratio beside the chosen answer's likelihood.")


class SimPOConfig(AnswerPairConfig):
    """SimPO (Meng 2024) on lines with `prompt`, `chosen` and `rejected`; no reference model."""

    beta: float = Field(2.0, gt=0, description="Factor of an answer's mean log-prob per token: its reward.")
    gamma: float = Field(1.0, ge=0, description="By how much the chosen answer's reward should exceed the other's.")


class ProcessRewardModelConfig(Section):
    """Process reward model (Lightman 2023) on lines with `prompt`, `steps` and `labels`."""

    max_tokens: int = Field(
        1024, ge=2, description="Longest prompt and answer together, in tokens; longer lines are skipped."
    )
    step_separator: str = Field(
        "\n", description="Put behind each step; the score is read at its last token. May be empty."
    )


class RewardModelConfig(PairConfig):
    """Reward model (Bradley-Terry) on lines with `prompt`, `chosen` and `rejected`."""

    use_margin: bool = Field(False, description="Each line's `margin` says by how much its chosen answer should win.")
    centring_coef: float = Field(0.0, ge=0, description="Factor of the squared sum of both scores: keeps them near 0.")

    @property
    def add_eos(self) -> bool:
        """The score is read at the end-of-sequence token."""
        return True
