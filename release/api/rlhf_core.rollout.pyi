class BatchBuffer(Generic[T]):

    def __init__(self, batch_size: int, limit: int=0, entries: Iterable[T]=()) -> None:
        ...

    def __len__(self) -> int:
        ...

    @property
    def num_entries(self) -> int:
        ...

    def put(self, entries: Iterable[T], *, timeout_seconds: float) -> None:
        ...

    def get(self, *, timeout_seconds: float) -> list[T]:
        ...

    def close(self, reason: str) -> None:
        ...

    def drain(self, reason: str) -> list[T]:
        ...

    def clear(self) -> None:
        ...

    def snapshot(self) -> list[T]:
        ...

def build_engine_beside(strategy: Strategy, policy: nn.Module, *, build: Callable[[nn.Module], RolloutEngine], copy: Callable[[], nn.Module]) -> tuple[RolloutEngine, WeightSync]:
    ...

class Checksum:

    def __init__(self) -> None:
        ...

    def add(self, chunk: Mapping[str, Tensor]) -> None:
        ...

    def hexdigest(self) -> str:
        ...

def coordinator_from_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    ...

def coordinator_to_tree(state: Mapping[str, Any]) -> dict[str, Any]:
    ...

class CopiedWeights:

    def __init__(self, receiver: WeightReceiver, shards: Callable[[], Iterable[Mapping[str, Tensor]]]) -> None:
        ...

    def publish(self, version: int) -> None:
        ...

def evaluation_metrics(rows: Sequence[EvaluationRow], num_prompts: int, score: str | None) -> dict[str, float]:
    ...

class EvaluationRow(NamedTuple):
    rewards: dict[str, float]
    num_tokens: int
    truncated: bool
    sampled: bool = False

    @classmethod
    def of(cls, items: Sequence[BufferItem], sampled: bool) -> EvaluationRow:
        ...

def group_from_tree(tree: Mapping[str, Any]) -> RolloutGroup:
    ...

def group_to_tree(group: RolloutGroup) -> dict[str, Any]:
    ...

class ModuleReceiver:

    def __init__(self, module: nn.Module, *, on_commit: Callable[[int], None], only: Callable[[str], bool] | None=None) -> None:
        ...

    def begin(self, version: int) -> None:
        ...

    def stage(self, version: int, chunk: Mapping[str, Tensor]) -> None:
        ...

    def commit(self, version: int, checksum: str | None=None) -> None:
        ...

def named_weights(module: nn.Module) -> dict[str, Tensor]:
    ...

class NoReceiver:

    def publish(self, version: int) -> None:
        ...

class Player(Protocol):

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        ...

    def play(self, samples: Sequence[tuple[Prompt, int]], times: PhaseTimes) -> Iterator[Played]:
        ...

    def close(self) -> None:
        ...

class PolicyEvaluator:

    def __init__(self, *, player: Callable[[SamplingParams], Player], scorer: RewardScorer, prompts: Sequence[Prompt], sampling: SamplingParams, temperature: float, score: str | None, batch_size: int, strategy: Ranks, sampled_temperature: float | None=None) -> None:
        ...

    @property
    def num_prompts(self) -> int:
        ...

    def close(self) -> None:
        ...

    def evaluate(self) -> dict[str, float]:
        ...

    def rows(self, start: int, stop: int) -> list[EvaluationRow]:
        ...

class PolicyExperienceMaker:

    def __init__(self, *, player: Player, samples_per_prompt: int, scorer: RewardScorer, hooks: HookRelay, reference_pass: ReferencePass | None=None, kl_coef: float | None=None, number: Callable[[int, int], int] | None=None) -> None:
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        ...

    def close(self) -> None:
        ...

    def take_times(self) -> PhaseTimes:
        ...

    def make(self, prompts: Sequence[Prompt]) -> Iterator[RolloutGroup]:
        ...

class RolloutCoordinator(Generic[GroupT]):

    def __init__(self, *, num_episodes: int, prompts_per_episode: int, max_staleness: int=0, lease_seconds: float=600.0, max_refill_factor: int=10, clock: Callable[[], float]=time.monotonic) -> None:
        ...

    @property
    def version(self) -> int:
        ...

    @property
    def finished(self) -> bool:
        ...

    def lease(self, maker: str, count: int) -> list[Lease]:
        ...

    def submit(self, group: GroupT, *, keep: bool=True) -> bool:
        ...

    def ready(self, episode: int) -> bool:
        ...

    def take(self, episode: int) -> list[GroupT]:
        ...

    def publish(self, version: int) -> None:
        ...

    def release(self, maker: str) -> int:
        ...

    def progress(self, episode: int) -> str:
        ...

    def state_dict(self) -> dict[str, Any]:
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ...

class SharedWeights:

    def __init__(self, engine: RolloutEngine) -> None:
        ...

    def publish(self, version: int) -> None:
        ...

class SingleAnswers:

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> None:
        ...

    def close(self) -> None:
        ...

    def play(self, samples: Sequence[tuple[Prompt, int]], times: PhaseTimes) -> Iterator[Played]:
        ...

def verify_weights(live: Mapping[str, Tensor], arrived: Mapping[str, Tensor], version: int) -> None:
    ...

def with_groups(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    ...
