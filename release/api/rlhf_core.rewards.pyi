def reward_spec(selected: Selected, config: BaseModel, context: RewardContext, call_options: RewardCallOptions, *, name: str | None=None, weight: float=1.0) -> RewardSpec:
    ...

class RewardCombiner:

    def __init__(self, weights: Mapping[str, float], clip: tuple[float, float] | None=None, normalise: bool=False) -> None:
        ...

    def combine(self, raw: Mapping[str, Tensor], *, counts: Tensor | None=None) -> Combined:
        ...

    def state_dict(self) -> dict[str, Any]:
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ...

class RewardScorer:

    def __init__(self, specs: Sequence[RewardSpec], *, cache_folder: Path | None=None, may_be_empty: bool=False) -> None:
        ...

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        ...

    def submit(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        ...

    def take_metrics(self) -> dict[str, float]:
        ...

    def close(self) -> None:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    name: str
    call_options: RewardCallOptions
    weight: float = 1.0
    function: Callable[..., Any] | None = None
    recipe: Callable[[], Callable[..., Any]] | None = None
    plugin: str = 'unknown plugin'
    source: str = ''
    options: Mapping[str, Any] = field(default_factory=dict)
