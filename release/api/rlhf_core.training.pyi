@dataclass(frozen=True, slots=True)
class BatchPlan:
    train_batch_size: int
    epochs_per_episode: int
    rank: int
    world_size: int

    def passes(self, samples: Sequence[Rows]) -> Iterator[list[Sequence[int]]]:
        ...

    def shares(self, samples: Sequence[Rows], batch: Sequence[int]) -> list[list[int]]:
        ...

    def batches(self, samples: Sequence[Rows], masked: Callable[[Any], Any], gap_version: int | None) -> Iterator[Iterator[TrainBatch]]:
        ...

def build_rollout_source(channel: ExperienceChannel, algorithm: RolloutAlgorithm, combiner: RewardCombiner, plan: BatchPlan, *, policy: nn.Module, strategy: Strategy, temperature: float, batch_tokens: int | None, timer: PhaseTimer, version: Callable[[], int], on_episode: Callable[[int, MadeEpisode, Sequence[BufferItem]], None]) -> RolloutSource:
    ...

@dataclass(frozen=True, slots=True)
class EpisodeBatches(Generic[B_co]):
    epochs: Iterable[Iterable[B_co]]
    metrics: Metrics = field(default_factory=dict)

class EpisodeRecord:

    def __init__(self, metrics: MetricsWriter | None, samples: SampleWriter | None, stack: ExitStack, *, watch: FileWatch | None=None, keep_samples: Keep='all', num_samples: int=0) -> None:
        ...

    @classmethod
    def open(cls, folder: RunFolder | None, hooks: HookRelay, *, step: int, episode: int, keep_samples: Keep, num_samples: int | None=None) -> EpisodeRecord:
        ...

    def rollouts(self, episode: int, made: MadeEpisode, items: Sequence[BufferItem]) -> None:
        ...

    def items(self, episode: int, items: Sequence[Any]) -> None:
        ...

    def start_episode(self, episode: int, version: int | None, metrics: Mapping[str, float]) -> None:
        ...

    def update(self, metrics: Mapping[str, float]) -> None:
        ...

    def end_episode(self, strategy: Strategy) -> dict[str, float]:
        ...

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        ...

    def flush(self, *, durable: bool=False) -> None:
        ...

@dataclass(frozen=True, slots=True)
class FitResult:
    eval_before: float | None
    eval_after: float | None
    step: int

Metrics = Mapping[str, float]

class PolicyPublisher:

    def __init__(self, sync: WeightSync, hooks: HookRelay, channel: ExperienceChannel | None=None) -> None:
        ...

    def publish(self, version: int, timer: PhaseTimer | None=None) -> None:
        ...

class RolloutSource:

    def __init__(self, channel: ExperienceChannel, estimates: EpisodeEstimates, plan: BatchPlan, *, version: Callable[[], int], on_episode: Callable[[int, MadeEpisode, Sequence[BufferItem]], None]) -> None:
        ...

    def episode(self, index: int) -> EpisodeBatches[TrainBatch]:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    tokenizer: PreTrainedTokenizerBase
    algorithm: Algorithm[Any, Any]
    prompts: PromptStream
    eval_prompts: PromptStream | None

@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    resolved: ResolvedRun
    folder: RunFolder
    hooks: HookRelay
    inputs: RunInputs
    resume: Path | None
    interrupted: Callable[[], bool]

@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    channel: ExperienceChannel | None
    prompts: PromptStream
    sync: WeightSync
    evaluator: Evaluator | None
    interrupted: Callable[[], bool]

@dataclass(frozen=True, slots=True)
class TrainBatch:
    items: Sequence[Any]
    gap_version: int | None = None

class Trainer(Generic[B]):

    def __init__(self, source: BatchSource[B], step: Callable[[B], Metrics], *, hooks: HookRelay, recorder: Recorder, num_updates: int=0) -> None:
        ...

    def fit(self, info: FitInfo) -> None:
        ...

    def learn(self, batches: Iterable[B], episode: int, epoch: int) -> None:
        ...

class TrainerSession:

    def __init__(self, resolved: ResolvedRun, folder: RunFolder, *, strategy: Strategy, algorithm: Algorithm[Any, Any], models: TrainerModels, parts: SessionParts, hooks: HookRelay) -> None:
        ...

    def fit(self, resume: Path | None=None) -> FitResult:
        ...

    def start_episode(self, episode: int, metrics: Metrics) -> None:
        ...

    def update(self, metrics: Metrics) -> None:
        ...

    def end_episode(self, episode: int) -> Metrics:
        ...

    def save(self, episode: int, step: int, best_value: float | None=None) -> None:
        ...

    @property
    def wall_seconds(self) -> float:
        ...

class Transport(Protocol):

    def run(self, request: RunRequest) -> FitResult:
        ...

class Updater:

    def __init__(self, algorithm: Algorithm[Any, Any], strategy: Strategy, trained: Mapping[str, Trained], *, micro_batch_tokens: int | None=None, micro_batch_size: int | None=None, compiled: bool=False) -> None:
        ...

    def update(self, items: Sequence[Any], *, gap_version: int | None=None) -> dict[str, float]:
        ...

    def evaluate(self, items: Sequence[Any]) -> dict[str, float]:
        ...
