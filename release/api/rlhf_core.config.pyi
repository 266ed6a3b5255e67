def bind_use(use: FunctionUse, *, where: str) -> Callable[[Any], Any]:
    ...

Command = Annotated[list[Annotated[str, StringConstraints(pattern='^[^\\x00]+$')]], Field(min_length=1), _IsCommand()]

class EngineConfig(Section):
    max_new_tokens: Count = Field(128, description='Longest answer, in tokens.')
    temperature: float = Field(1.0, gt=0, description='Softmax temperature of sampling.')
    top_k: int = Field(0, ge=0, description='Sample from the k likeliest tokens only; 0 is off.')
    top_p: float = Field(1.0, gt=0, le=1, description='Sample from the smallest set with this probability; 1 is off.')
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, description='Texts that end an answer, besides the end-of-sequence token.')

    def sampling(self) -> SamplingParams:
        ...

FunctionChoice = str | dict[str, Any]

@dataclass(frozen=True, slots=True)
class FunctionUse:
    kind: FunctionKind
    choice: FunctionChoice
    shared: Mapping[str, Any] = field(default_factory=dict)

class ModelConfig(Section):
    path: str = Field(min_length=1, description='A model folder, a hub name, or `builtin:NAME`.')
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = Field('auto', description='Type the weights are loaded in. auto: float32, also on a GPU, where the arithmetic is bf16 (strategy.precision); 16 bits only where strategy.master_weights is false. Trained weights of 16 bits have float32 masters in the optimizer.')
    device: str = Field('auto', pattern='^(auto|cpu|cuda(:\\d+)?)$', description='auto, cpu, cuda or cuda:N; auto takes a GPU if any.')
    gradient_checkpointing: bool = Field(False, description='Recompute activations in the backward pass: less memory, more time.')
    offload_reference: bool = Field(False, description='Keep the reference in host memory while it is not asked, which frees that much of a GPU. Nothing to gain with LoRA, where it is the policy itself, and not done where a strategy divides it.')
    lora: LoraConfig | None = Field(None, description='Train low-rank adapters only; null trains all weights.')
    allow_missing_weights: bool = Field(False, description="Start weights that the model's files lack from random numbers, in place of an error.")
    trust_remote_code: bool = Field(False, description='Run Python code that comes with a hub model. Only for sources you trust.')

class NamesFunctions(ABC):

    @abstractmethod
    def functions(self) -> Mapping[str, FunctionUse]:
        ...

@dataclass(frozen=True, slots=True)
class OwnProcesses:
    trainers: int
    makers: int
    option: str

class PolicyLossSection(Section):
    aggregation: Literal['token-mean', 'sequence-mean-token-mean', 'sequence-mean-token-sum', 'sequence-mean-token-sum-norm'] = Field('token-mean', description='How token losses become one number, over the global batch.')
    norm_length: int | None = Field(None, ge=1, description='Divisor of sequence-mean-token-sum-norm, in tokens; null takes engine.max_new_tokens.')
    entropy_coef: float = Field(0.0, ge=0, description='Factor of the entropy bonus.')
    kl_coef: float = Field(0.05, ge=0, description='Factor of the KL penalty; 0 builds no reference model.')
    kl_estimator: Literal['k1', 'k2', 'k3'] = Field('k1', description='Estimator of the KL per token.')
    kl_in: Literal['reward', 'loss'] = Field('reward', description='Penalise the KL in the reward or in the loss.')
    importance_cap: float | None = Field(None, gt=0, description='Weight tokens by min(trainer / engine probability, this), for an engine or version that lags; null is off.')

    def weighing_late_samples(self) -> PolicyLossSection:
        ...

class Problems:

    def __init__(self) -> None:
        ...

    def __len__(self) -> int:
        ...

    def add(self, path: str, message: str, hint: str | None=None) -> None:
        ...

    def add_error(self, path: str, error: RlhfError) -> None:
        ...

    def validate(self, model: type[ModelT], data: Mapping[str, Any], path: str='', also_known: Sequence[str]=()) -> ModelT | None:
        ...

    def raise_if_any(self, where: str) -> None:
        ...

class PromptsConfig(Section):
    max_prompt_tokens: Count = Field(512, description='Longest prompt trained on, in tokens.')
    too_long: Literal['skip', 'error'] = Field('skip', description='What to do with a longer prompt.')

def resolve(run: Mapping[str, Any], *, where: str='run file', trust: FileTrust=EVERY_FILE) -> ResolvedRun:
    ...

def resolve_reward(entry: Any, problems: Problems, path: str, trust: FileTrust=EVERY_FILE) -> SelectedReward | None:
    ...

@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    run: RunConfig
    algorithm: Configured
    strategy: Configured
    engine: Configured
    transport: Configured
    prompts: Configured
    eval_prompts: Configured | None
    rewards: tuple[SelectedReward, ...]
    environment: SelectedEnvironment | None = None

    @property
    def reward_weights(self) -> dict[str, float]:
        ...

    @property
    def sampling(self) -> SamplingParams:
        ...

    @property
    def own_processes(self) -> OwnProcesses | None:
        ...

    @property
    def rolls_out(self) -> bool:
        ...

    @property
    def evaluates(self) -> bool:
        ...

    @property
    def generates(self) -> bool:
        ...

    @property
    def commands(self) -> frozenset[tuple[str, ...]]:
        ...

    def to_mapping(self) -> dict[str, Any]:
        ...

class RewardCallOptions(Section):
    batch_size: Count | None = Field(None, description='Answers scored in one call; null takes all there are.')
    concurrency: Count = Field(1, description='Calls in flight at once.')
    timeout_seconds: float = Field(60.0, gt=0, description='Deadline of one call, in seconds.')
    retries: int = Field(0, ge=0, description='Times a failed call is tried again.')
    on_failure: Literal['fail', 'zero', 'drop'] = Field('fail', description='A call that still fails: end the run, score its answers 0, or leave them out.')
    cache: bool = Field(False, description='Remember scores in the run folder, by what the reward is and what it is shown.')
    isolate: bool | None = Field(None, description='Run in a process of its own, which a deadline can end; null leaves it to the reward.')
    memory_limit_bytes: Count | None = Field(None, description='With isolate: resident memory at which its process is ended; null is half of what there is.')

    def without_cache(self) -> RewardCallOptions:
        ...

def secret_value(secret: SecretStr, where: str) -> str:
    ...

class Section(BaseModel):
    model_config = ConfigDict(extra='forbid', frozen=True, allow_inf_nan=False)

class TransportConfig(Section):

    def own_processes(self) -> OwnProcesses | None:
        ...

    def staleness_bound(self) -> int:
        ...
