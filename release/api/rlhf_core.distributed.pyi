def end_with_parent() -> None:
    ...

@dataclass
class ProcessGroup:
    device: torch.device
    timeout_seconds: float
    env: LaunchEnv = field(default_factory=read_launch_env)

    @property
    def rank(self) -> int:
        ...

    @property
    def world_size(self) -> int:
        ...

    def join(self) -> None:
        ...

    def leave(self) -> None:
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp='sum') -> Tensor:
        ...

    def all_gather_objects(self, value: Any) -> list[Any]:
        ...

    @contextlib.contextmanager
    def guard(self, waiting_for: str) -> Iterator[None]:
        ...

def read_launch_env(environ: Mapping[str, str] | None=None) -> LaunchEnv:
    ...

def stop_signals() -> tuple[signal.Signals, ...]:
    ...
