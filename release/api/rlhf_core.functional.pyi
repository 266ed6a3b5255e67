class AdaptiveKLController:

    def __init__(self, init: float, target: float, horizon: float) -> None:
        ...

    @property
    def value(self) -> float:
        ...

    def update(self, kl: float, num_samples: int) -> None:
        ...

    def state_dict(self) -> dict[str, float]:
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        ...

@dataclass(frozen=True, slots=True)
class AdvantageInput:
    rewards: Tensor
    mask: Tensor
    group_ids: Tensor
    scores: Tensor | None = None
    sample_ids: Tensor | None = None
    all_reduce: Reduce = alone

    @property
    def totals(self) -> Tensor:
        ...

@dataclass(frozen=True, slots=True)
class Advantages:
    advantages: Tensor
    returns: Tensor

def aggregate_count(mask: Tensor, aggregation: Aggregation) -> float:
    ...

def aggregate_sum(values: Tensor, mask: Tensor, aggregation: Aggregation, norm_length: int | None=None) -> Tensor:
    ...

Aggregation = Literal['token-mean', 'sequence-mean-token-mean', 'sequence-mean-token-sum', 'sequence-mean-token-sum-norm']

def bradley_terry_loss(chosen_scores: Tensor, rejected_scores: Tensor, *, margin: Tensor | float=0.0, centring_coef: float=0.0) -> PairLoss:
    ...

def cispo_policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip_eps_low: float, clip_eps_high: float) -> PolicyLoss:
    ...

def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    ...

def dpo_loss(chosen_log_probs: Tensor, rejected_log_probs: Tensor, reference_chosen_log_probs: Tensor | None, reference_rejected_log_probs: Tensor | None, *, beta: float, kind: DPOKind='sigmoid', label_smoothing: float=0.0) -> PairLoss:
    ...

DPOKind = Literal['sigmoid', 'ipo', 'hinge']

def effective_sample_size(weights: Tensor, mask: Tensor, all_reduce: Reduce=alone) -> Tensor:
    ...

def entropy(logits: Tensor, temperature: float=1.0, support_ids: Tensor | None=None) -> Tensor:
    ...

def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_reduce: Reduce=alone) -> float | None:
    ...

class FixedKLController:

    def __init__(self, value: float) -> None:
        ...

    @property
    def value(self) -> float:
        ...

    def update(self, kl: float, num_samples: int) -> None:
        ...

    def state_dict(self) -> dict[str, float]:
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        ...

def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Advantages:
    ...

def greedy_sample(logits: Tensor) -> SampledTokens:
    ...

def group_normalised(scores: Tensor, group_ids: Tensor, *, sample_ids: Tensor | None=None, divide_by_std: bool=True, leave_one_out: bool=False, eps: float=1e-06) -> Tensor:
    ...

def group_spread(scores: Tensor, group_ids: Tensor, sample_ids: Tensor | None=None) -> GroupSpread:
    ...

@dataclass(frozen=True, slots=True)
class GroupSpread:
    std_mean: float
    without_spread_fraction: float

def importance_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: RatioLevel='token') -> Tensor:
    ...

@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    weights: Tensor
    truncated: Tensor
    effective_sample_size: Tensor

def inverse_cdf_sample(logits: Tensor, uniforms: Tensor, temperature: float=1.0, top_k: int=0, top_p: float=1.0) -> SampledTokens:
    ...

def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    ...

class KLController(Protocol):

    @property
    def value(self) -> float:
        ...

    def update(self, kl: float, num_samples: int) -> None:
        ...

    def state_dict(self) -> dict[str, float]:
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        ...

KLEstimator = Literal['k1', 'k2', 'k3']

def last_true_index(mask: Tensor) -> Tensor:
    ...

def leave_one_out(scores: Tensor, group_ids: Tensor, sample_ids: Tensor | None=None) -> Tensor:
    ...

def lengths_to_first_eos(token_ids: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    ...

def mask_from_lengths(lengths: Tensor, size: int) -> Tensor:
    ...

def masked_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    ...

def masked_mean(values: Tensor, mask: Tensor, dim: int | None=None) -> Tensor:
    ...

def masked_sum(values: Tensor, mask: Tensor, dim: int | None=None) -> Tensor:
    ...

def masked_var(values: Tensor, mask: Tensor, dim: int | None=None) -> Tensor:
    ...

def masked_whiten(values: Tensor, mask: Tensor, eps: float=1e-08, *, all_reduce: Reduce=alone) -> Tensor:
    ...

def mean_over_ranks(values: Tensor, mask: Tensor, all_reduce: Reduce) -> Tensor:
    ...

def off_policy_correction(trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, *, cap: float | None=None, level: RatioLevel='token', token_range: Range | None=None, sequence_range: Range | None=None, all_reduce: Reduce=alone) -> OffPolicyCorrection:
    ...

@dataclass(frozen=True, slots=True)
class OffPolicyCorrection:
    weights: Tensor
    kept: Tensor
    truncated: Tensor
    ratio: Tensor
    effective_sample_size: Tensor

def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    ...

@dataclass(frozen=True, slots=True)
class PairLoss:
    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        ...

    @property
    def is_right(self) -> Tensor:
        ...

def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ...

def policy_metrics(policy: PolicyLoss, output: PolicyOutput, old_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    ...

@dataclass(frozen=True, slots=True)
class PolicyLoss:
    losses: Tensor
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor

@dataclass(frozen=True, slots=True)
class PolicyLossInput:
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor

def position_ids_of(attention_mask: Tensor) -> Tensor:
    ...

def ppo_policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip_eps_low: float, clip_eps_high: float, dual_clip: float | None=None, ratio_level: RatioLevel='token') -> PolicyLoss:
    ...

RatioLevel = Literal['token', 'sequence']

def response_logits(logits: Tensor, num_actions: int) -> Tensor:
    ...

def response_values(values: Tensor, num_actions: int) -> Tensor:
    ...

def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float=1.0) -> Tensor:
    ...

@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: Tensor
    log_probs: Tensor
    support_ids: Tensor | None

def sum_and_mean_over_ranks(values: Tensor, mask: Tensor, all_reduce: Reduce) -> tuple[Tensor, Tensor]:
    ...

def sums_of_samples(values: Tensor, sample_ids: Tensor | None) -> Tensor:
    ...

def to_tokens(values: Tensor, mask: Tensor) -> Tensor:
    ...

def token_log_probs(logits: Tensor, labels: Tensor, temperature: float=1.0, support_ids: Tensor | None=None) -> Tensor:
    ...

def token_rewards(scores: Tensor, kl: Tensor | None, kl_coef: float | Tensor, action_mask: Tensor, turn_rewards: Tensor | None=None) -> Tensor:
    ...

def truncated_importance_weights(trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, *, cap: float, all_reduce: Reduce=alone) -> ImportanceWeights:
    ...

def uniforms(seed: int, sample_ids: Tensor, token_indices: Tensor) -> Tensor:
    ...

def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_eps: float | None) -> ValueLoss:
    ...

@dataclass(frozen=True, slots=True)
class ValueLoss:
    losses: Tensor
    clipped: Tensor

def whitened_by_counts(values: Tensor, counts: Tensor, eps: float=1e-08) -> Tensor:
    ...
