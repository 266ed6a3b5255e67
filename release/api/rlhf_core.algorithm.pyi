@dataclass(frozen=True, slots=True)
class Mean:
    total: Tensor | float
    count: Tensor | float

@dataclass(frozen=True, slots=True)
class Max:
    value: Tensor | float

Metric = Mean | Max

@dataclass(frozen=True, slots=True)
class LossOutput:
    sums: Mapping[str, Tensor]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    log_probs: Tensor | None = None

@dataclass(frozen=True, slots=True)
class LossTerm:
    role: Role
    coefficient: float = 1.0

class Item(Protocol):

    @property
    def num_tokens(self) -> int:
        ...

class Batch(Protocol):

    def __len__(self) -> int:
        ...

ModelKind = Literal['causal-lm', 'sequence-classification']

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

Needs = Literal['scalars', 'row', 'group', 'episode']

def needs(what: Needs) -> Callable[[FunctionT], FunctionT]:
    ...

def needs_of(estimator: Callable[..., Any]) -> Needs:
    ...

@dataclass(frozen=True, slots=True)
class EpisodeOutput:
    experience: Experience
    metrics: Mapping[str, float]

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

class DatasetAlgorithm(Algorithm[ItemT, BatchT]):

    @abstractmethod
    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> ItemT | None:
        ...

    def prepare_items(self, items: Sequence[ItemT], reference: Callable[[Sequence[ItemT]], Sequence[Tensor]]) -> Sequence[ItemT]:
        ...

    def reference_forward(self, model: nn.Module, batch: BatchT) -> Tensor:
        ...
