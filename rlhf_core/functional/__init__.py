"""The mathematics of all algorithms as pure functions on tensors.

Legend: B sequences, S prompt and response tokens, A response tokens, V vocabulary, K kept tokens. A mask is named
for what True means. Log-probs are in nats and float32.
"""

from .advantages import (
    Advantages,
    explained_variance,
    gae,
    group_normalised,
    leave_one_out,
    rewards_to_go,
    token_rewards,
)
from .chunked import LogProbsAndEntropy, chunked_log_probs_and_entropy
from .forward import PolicyOutput, causal_lm_logits, innermost, policy_forward, value_forward
from .kl import AdaptiveKLController, FixedKLController, KLController, KLEstimator, clamp_log_ratio, kl_estimate
from .logprobs import entropy, response_logits, response_values, token_log_probs
from .losses import (
    ImportanceWeights,
    PolicyLoss,
    RatioLevel,
    ValueLoss,
    cispo_policy_loss,
    importance_ratio,
    masked_cross_entropy,
    ppo_policy_loss,
    truncated_importance_weights,
    value_loss,
)
from .masking import (
    Aggregation,
    aggregate_count,
    aggregate_sum,
    last_true_index,
    lengths_to_first_eos,
    mask_from_lengths,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    position_ids_of,
    to_tokens,
)
from .noise import SampledTokens, greedy_sample, inverse_cdf_sample, philox4x32, uniforms
from .preference import DPOKind, PairLoss, bradley_terry_loss, dpo_loss

__all__ = [
    "AdaptiveKLController",
    "Advantages",
    "Aggregation",
    "DPOKind",
    "FixedKLController",
    "ImportanceWeights",
    "KLController",
    "KLEstimator",
    "LogProbsAndEntropy",
    "PairLoss",
    "PolicyLoss",
    "PolicyOutput",
    "RatioLevel",
    "SampledTokens",
    "ValueLoss",
    "aggregate_count",
    "aggregate_sum",
    "bradley_terry_loss",
    "causal_lm_logits",
    "chunked_log_probs_and_entropy",
    "cispo_policy_loss",
    "clamp_log_ratio",
    "dpo_loss",
    "entropy",
    "explained_variance",
    "gae",
    "greedy_sample",
    "group_normalised",
    "importance_ratio",
    "innermost",
    "inverse_cdf_sample",
    "kl_estimate",
    "last_true_index",
    "leave_one_out",
    "lengths_to_first_eos",
    "mask_from_lengths",
    "masked_cross_entropy",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "philox4x32",
    "policy_forward",
    "position_ids_of",
    "ppo_policy_loss",
    "response_logits",
    "response_values",
    "rewards_to_go",
    "to_tokens",
    "token_log_probs",
    "token_rewards",
    "truncated_importance_weights",
    "uniforms",
    "value_forward",
    "value_loss",
]
