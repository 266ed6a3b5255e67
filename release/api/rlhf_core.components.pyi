API_VERSION = 2

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

@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    sampling: SamplingParams
    samples_per_prompt: int
    tokenizer: PreTrainedTokenizerBase
    max_sequence_tokens: int | None = None
    score: Callable[[Mapping[str, float]], float] = _sum_of_rewards

@dataclass(frozen=True, slots=True)
class StrategyContext:
    device: str

@dataclass(frozen=True, slots=True)
class RewardContext:
    device: str
    seed: int
    model_path: str | None = None

@dataclass(frozen=True, slots=True)
class EngineContext:
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    seed: int
    model_path: str | None = None
    compute_dtype: torch.dtype | None = None

@dataclass(frozen=True, slots=True)
class PromptsContext:
    seed: int
    base_folder: Path
    has_chat_template: bool = False

@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    seed: int
    base_folder: Path
