@dataclass(frozen=True)
class StrategyCase:
    name: str
    build: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = 'cpu'

    def make(self) -> Strategy:
        ...

def observe(strategy: Strategy, folder: Path) -> dict[str, Any]:
    ...

def run_strategies(cases: Sequence[StrategyCase], num_processes: int, folder: Path, *, load_chain: Sequence[str]=()) -> dict[str, dict[str, Any]]:
    ...
