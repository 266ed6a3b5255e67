class CheckpointStore:

    def __init__(self, folder: Path, *, keep: int) -> None:
        ...

    def path(self, step: int) -> Path:
        ...

    def partial(self, step: int) -> Path:
        ...

    def begin(self, step: int) -> Path:
        ...

    def commit(self, step: int, *, best: int | None=None) -> Path:
        ...

    def abandon(self, step: int) -> None:
        ...

    def steps(self) -> list[int]:
        ...

    def newest(self) -> Path | None:
        ...

    def whole(self) -> Iterator[Path]:
        ...

    def discard_after(self, step: int, *, best: int | None=None) -> None:
        ...

    def discard_partial(self) -> None:
        ...

def find_damage(path: Path) -> str | None:
    ...

def load_channel_state(folder: Path) -> dict[str, Any] | None:
    ...

def load_run_state(folder: Path, trained: Mapping[str, Trained], strategy: Strategy) -> RunState:
    ...

class MetricsWriter:

    def __init__(self, path: Path, *, on_line: Callable[[Line], object] | None=None, step: int=0) -> None:
        ...

    @classmethod
    def resume(cls, path: Path, *, step: int, on_line: Callable[[Line], object] | None=None) -> MetricsWriter:
        ...

    @property
    def step(self) -> int:
        ...

    def start_episode(self, *, episode: int, policy_version: int | None, values: Mapping[str, Number]) -> None:
        ...

    def add_episode_values(self, values: Mapping[str, Number]) -> None:
        ...

    def update(self, values: Mapping[str, Number]) -> None:
        ...

    def end_episode(self, values: Mapping[str, Number]) -> None:
        ...

    @property
    def holds_line(self) -> bool:
        ...

    def evaluation(self, values: Mapping[str, Number]) -> None:
        ...

    def flush(self, *, sync: bool=False) -> None:
        ...

    def close(self) -> None:
        ...

class PhaseTimer:

    def __init__(self, *, synchronize: Callable[[], object] | None=None) -> None:
        ...

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        ...

    def add(self, name: str, seconds: float) -> None:
        ...

    def seconds(self, name: str) -> float:
        ...

    def take(self) -> dict[str, float]:
        ...

class RunFolder:

    def __init__(self, path: Path, lock: IO[str] | None=None, made: Sequence[Path]=()) -> None:
        ...

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        ...

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        ...

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        ...

    def refuse_oddities(self) -> None:
        ...

    @property
    def holds_run(self) -> bool:
        ...

    @property
    def has_begun(self) -> bool:
        ...

    @property
    def is_in_use(self) -> bool:
        ...

    @property
    def lock(self) -> Path:
        ...

    @property
    def config(self) -> Path:
        ...

    @property
    def manifest(self) -> Path:
        ...

    @property
    def metrics(self) -> Path:
        ...

    @property
    def samples(self) -> Path:
        ...

    @property
    def summary(self) -> Path:
        ...

    @property
    def log(self) -> Path:
        ...

    @property
    def checkpoints(self) -> Path:
        ...

    @property
    def model(self) -> Path:
        ...

    @property
    def adapter(self) -> Path:
        ...

    @property
    def control(self) -> Path:
        ...

    @property
    def tensorboard(self) -> Path:
        ...

    @property
    def performance(self) -> Path:
        ...

    @property
    def report(self) -> Path:
        ...

    def discard_half_written(self) -> None:
        ...

    def write_config(self, config: Mapping[str, Any]) -> None:
        ...

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        ...

    def add_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        ...

    def events(self, kind: str) -> list[dict[str, Any]]:
        ...

    def write_summary(self, *, status: RunStatus, eval_before: float | None, eval_after: float | None, wall_s: float, extra: Mapping[str, Any] | None=None) -> dict[str, Any]:
        ...

    def write_running(self, *, eval_before: float | None=None, wall_s: float=0.0) -> None:
        ...

    def read_json(self, path: Path) -> dict[str, Any]:
        ...

    def read_config(self) -> dict[str, Any]:
        ...

    @contextmanager
    def logging(self, level: int=logging.DEBUG) -> Iterator[None]:
        ...

    def close(self) -> None:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    step: int
    next_episode: int
    policy_version: int
    eval_before: float | None
    algorithm: dict[str, Any]
    combiner: dict[str, Any]
    wall_s: float
    lr_factors: dict[str, float] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    rollbacks: int = 0
    num_samples: int | None = None
    best_step: int | None = None
    best_value: float | None = None

def save_run_state(folder: Path, state: RunState, channel: Mapping[str, Any] | None, trained: Mapping[str, Trained], strategy: Strategy) -> None:
    ...
