class Algorithm(ABC, Generic[ItemT, BatchT]):

    @property
    @abstractmethod
    def roles(self) -> frozenset[Role]:
        ...

    @property
    @abstractmethod
    def terms(self) -> Mapping[str, LossTerm]:
        ...

    @abstractmethod
    def collate(self, items: Sequence[ItemT]) -> BatchT:
        ...

    @abstractmethod
    def to_device(self, batch: BatchT, device: torch.device) -> BatchT:
        ...

    @abstractmethod
    def masked(self, item: ItemT) -> ItemT:
        ...

    @property
    def model_kind(self) -> ModelKind:
        ...

    def build_critic(self, policy: nn.Module) -> nn.Module:
        ...

    @abstractmethod
    def counts(self, batch: BatchT) -> Mapping[str, float]:
        ...

    @abstractmethod
    def loss(self, models: Mapping[str, nn.Module], batch: BatchT) -> LossOutput:
        ...

    def set_option(self, name: str, value: float) -> None:
        ...

    def end_episode(self) -> None:
        ...

    def state_dict(self) -> dict[str, Any]:
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ...

API_VERSION = 2

class CheckpointError(RlhfError):
    ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    sample_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    support_ids: Sequence[Sequence[int]] | None = None
    branch: int = 0

@dataclass(frozen=True, slots=True)
class Component:
    summary: str
    config: type[BaseModel]
    build: str
    requires: tuple[str, ...] = ()
    install: str | None = None
    api_version: int = API_VERSION
    isolate: bool = False
    feeds: Literal['rollouts', 'dataset'] = 'rollouts'
    credits_turns: bool = False
    max_processes: int | None = None
    quickstart: str | None = None

class ConfigError(UserInputError):
    ...

class DataError(UserInputError):
    ...

class DatasetAlgorithm(Algorithm[ItemT, BatchT]):

    @abstractmethod
    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> ItemT | None:
        ...

    def prepare_items(self, items: Sequence[ItemT], reference: Callable[[Sequence[ItemT]], Sequence[Tensor]]) -> Sequence[ItemT]:
        ...

    def reference_forward(self, model: nn.Module, batch: BatchT) -> Tensor:
        ...

class DeadlineError(RlhfError):
    ...

class DivergenceError(RlhfError):
    ...

@dataclass(frozen=True, slots=True)
class EpisodeOutput:
    experience: Experience
    metrics: Mapping[str, float]

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
class GenerationRequest:
    sample_id: int
    prompt_ids: tuple[int, ...]
    branch: int = 0
    offset: int = 0
    max_new_tokens: int | None = None

class GuardStop(RlhfError):
    ...

class HookError(RlhfError):
    ...

hookimpl = pluggy.HookimplMarker(PROJECT)

class InterruptedRun(RlhfError):
    exit_code = 130

@dataclass(frozen=True, slots=True)
class LossOutput:
    sums: Mapping[str, Tensor]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    log_probs: Tensor | None = None

@dataclass(frozen=True, slots=True)
class LossTerm:
    role: Role
    coefficient: float = 1.0

class OutOfMemoryError(RlhfError):
    ...

class PluginError(UserInputError):
    ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    position: int
    text: str
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

class RewardError(RlhfError):
    ...

class RlhfError(Exception):
    exit_code = 1

    def __init__(self, message: str, *, where: str | None=None, hint: str | None=None) -> None:
        ...

    def render(self) -> str:
        ...

    def raised_by(self, who: str) -> None:
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

class RolloutAlgorithm(Algorithm[BufferItem, Experience]):

    @abstractmethod
    def advantages(self, episode: Experience) -> EpisodeOutput:
        ...

    @property
    def needs(self) -> Needs:
        ...

    @property
    def needs_trainer_log_probs(self) -> bool:
        ...

    def keep(self, group: RolloutGroup) -> bool:
        ...

    def collate(self, items: Sequence[BufferItem]) -> Experience:
        ...

    def to_device(self, batch: Experience, device: torch.device) -> Experience:
        ...

    def masked(self, item: BufferItem) -> BufferItem:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    position: int
    rollouts: tuple[Rollout, ...]
    items: tuple[BufferItem, ...]

    @property
    def is_empty(self) -> bool:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    greedy: bool = False
    max_length: int | None = None

class Section(BaseModel):
    model_config = ConfigDict(extra='forbid', frozen=True, allow_inf_nan=False)

class Strategy(ABC):

    @property
    @abstractmethod
    def rank(self) -> int:
        ...

    @property
    @abstractmethod
    def world_size(self) -> int:
        ...

    @property
    @abstractmethod
    def device(self) -> torch.device:
        ...

    @property
    def is_main(self) -> bool:
        ...

    @property
    @abstractmethod
    def shards_parameters(self) -> bool:
        ...

    @property
    @abstractmethod
    def parameter_dtype(self) -> torch.dtype:
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        ...

    @property
    def compute_dtype(self) -> torch.dtype | None:
        ...

    def setup(self) -> None:
        ...

    def teardown(self) -> None:
        ...

    def naming_lost_peers(self) -> AbstractContextManager[Any]:
        ...

    def model_init_context(self) -> AbstractContextManager[Any]:
        ...

    def state_bytes(self, num_processes: int, dtype: torch.dtype) -> StateBytes:
        ...

    @abstractmethod
    def make_optimizer(self, params: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float]=(0.9, 0.999), eps: float=1e-08, weight_decay: float=0.0) -> Optimizer:
        ...

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None=None, *, max_grad_norm: float | None=None) -> Trained:
        ...

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        ...

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        ...

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        ...

    @property
    @abstractmethod
    def gradient_average_factor(self) -> int:
        ...

    @abstractmethod
    def step(self, trained: Trained) -> float:
        ...

    def drop_gradients(self, trained: Trained) -> None:
        ...

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp='sum') -> Tensor:
        ...

    @abstractmethod
    def all_gather_objects(self, value: Any) -> list[Any]:
        ...

    def broadcast_object(self, value: Any) -> Any:
        ...

    def barrier(self) -> None:
        ...

    def run_on_main(self, action: Callable[[], None]) -> None:
        ...

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        ...

    @abstractmethod
    def state_dict_shards(self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None=None) -> Iterator[dict[str, Tensor]]:
        ...

    @abstractmethod
    def save_model(self, model: nn.Module, path: Path) -> None:
        ...

    @abstractmethod
    def load_model(self, model: nn.Module, path: Path) -> None:
        ...

    @abstractmethod
    def save_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        ...

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        ...

    @abstractmethod
    def save_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        ...

    @abstractmethod
    def load_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        ...

class SyncError(RlhfError):
    ...

def train(run: str | Path | Mapping[str, Any], *, output: Path | str | None=None, resume: str | None=None, num_processes: int=1, dry_run: bool=False, overrides: Sequence[Override]=(), hooks: Sequence[object | str]=(), origin: Path | None=None, trust: FileTrust | bool=False) -> TrainResult | None:
    ...

@dataclass(frozen=True, slots=True)
class TrainResult:
    run_folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

class UserInputError(RlhfError):
    exit_code = 2
