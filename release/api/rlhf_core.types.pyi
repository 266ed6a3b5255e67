Role = Literal['policy', 'critic', 'reference']

FinishReason = Literal['stop', 'length']

Message = Mapping[str, Any]

@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    position: int
    text: str
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    role: Literal['policy', 'environment']
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    reward: float = 0.0
    tool_calls: tuple[ToolCall, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        ...

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Turn:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    sample_id: int
    prompt: str
    messages: tuple[Message, ...] | None
    prompt_ids: tuple[int, ...]
    completion: str
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    answer: Any
    metadata: Mapping[str, Any]
    policy_version: int
    finish_reason: FinishReason
    action_mask: tuple[bool, ...] | None = None
    group_id: int = 0
    branch: int = 0
    turns: tuple[Turn, ...] = ()

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class BufferItem:
    sample_id: int
    group_id: int
    policy_version: int
    prompt_ids: Tensor
    response_ids: Tensor
    action_mask: Tensor
    action_log_probs: Tensor
    rewards: Mapping[str, float] = field(default_factory=dict)
    reference_log_probs: Tensor | None = None
    values: Tensor | None = None
    trainer_log_probs: Tensor | None = None
    support_ids: Tensor | None = None
    truncated: bool = False
    kl_coef: float | None = None
    score: float | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    branch: int = 0
    turn_rewards: Tensor | None = None
    environment: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        ...

    @property
    def num_response_tokens(self) -> int:
        ...

    @property
    def num_sampled_tokens(self) -> int:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    action_log_probs: Tensor
    sample_ids: Tensor
    group_ids: Tensor
    policy_versions: Tensor
    truncated: Tensor
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    reference_log_probs: Tensor | None = None
    values: Tensor | None = None
    trainer_log_probs: Tensor | None = None
    support_ids: Tensor | None = None
    kl_coef: Tensor | None = None
    scores: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    branches: Tensor | None = None
    turn_rewards: Tensor | None = None
    part_of: Whole | None = None

    def __len__(self) -> int:
        ...

    @property
    def num_samples(self) -> int:
        ...

    @property
    def row_sample_ids(self) -> Tensor | None:
        ...

    @property
    def num_actions(self) -> int:
        ...

    @property
    def prompt_length(self) -> int:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    position: int
    rollouts: tuple[Rollout, ...]
    items: tuple[BufferItem, ...]

    @property
    def is_empty(self) -> bool:
        ...

def sum_by_key(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    ...

@dataclass(slots=True)
class PhaseTimes:
    rollout_s: float = 0.0
    environment_s: float = 0.0
    reward_s: float = 0.0
    forward_s: float = 0.0
    response_tokens: int = 0
    reward_calls: dict[str, float] = field(default_factory=dict)

    def add(self, other: PhaseTimes) -> None:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class MadeEpisode:
    groups: Sequence[RolloutGroup]
    times: PhaseTimes
    metrics: Mapping[str, float] = field(default_factory=dict)

@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    greedy: bool = False
    max_length: int | None = None

@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    sample_id: int
    prompt_ids: tuple[int, ...]
    branch: int = 0
    offset: int = 0
    max_new_tokens: int | None = None

@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    sample_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    support_ids: Sequence[Sequence[int]] | None = None
    branch: int = 0
