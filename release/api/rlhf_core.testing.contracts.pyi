class AlgorithmContract(ComponentContract):
    kind = 'algorithms'
    samples_per_prompt: ClassVar[int] = 4
    learns_from_scores: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 0.001
    tolerance: ClassVar[float] = 0.0001

    @pytest.fixture
    @classmethod
    def bench(cls, selected: Selected, config: BaseModel, rlhf_device: str) -> RolloutBench:
        ...

class ComponentContract:
    kind: ClassVar[Kind]
    plugin: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def make_options(cls, folder: Path) -> Mapping[str, Any]:
        ...

    @pytest.fixture(scope='class')
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        ...

    @pytest.fixture(scope='class')
    @classmethod
    def given(cls, folder: Path) -> dict[str, Any]:
        ...

    @pytest.fixture(scope='class')
    @classmethod
    def selected(cls) -> Selected:
        ...

    @pytest.fixture(scope='class')
    @classmethod
    def config(cls, selected: Selected, given: dict[str, Any]) -> BaseModel:
        ...

def contracts_for(contract: type[ComponentContract], *, options: Mapping[str, Mapping[str, Any]] | None=None, skip: Mapping[str, str] | None=None) -> dict[str, type[ComponentContract]]:
    ...

class DatasetAlgorithmContract(ComponentContract):
    kind = 'algorithms'
    records: ClassVar[Sequence[Mapping[str, Any]]] = RECORDS
    learning_rate: ClassVar[float] = 0.001
    tolerance: ClassVar[float] = 0.0001

    @pytest.fixture
    @classmethod
    def bench(cls, selected: Selected, config: BaseModel, rlhf_device: str) -> DatasetBench:
        ...

class EngineContract(ComponentContract):
    kind = 'engines'
    shares_module: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    log_prob_tolerance: ClassVar[float] = 0.0001
    hidden_size: ClassVar[int] = 32

    @pytest.fixture(scope='class')
    @classmethod
    def bench(cls, selected: Selected, config: BaseModel, rlhf_device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        ...

class EnvironmentContract(ComponentContract):
    kind = 'environments'
    records: ClassVar[Sequence[Mapping[str, Any]]] = ()
    replies: ClassVar[Sequence[str]] = ()
    chat: ClassVar[bool] = True
    deterministic: ClassVar[bool] = True
    max_turns: ClassVar[int] = 4
    timeout_seconds: ClassVar[float] = 60.0

    @pytest.fixture(scope='class')
    @classmethod
    def environment(cls, selected: Selected, config: BaseModel) -> SelectedEnvironment:
        ...

    @pytest.fixture(scope='class')
    @classmethod
    def episodes(cls, environment: SelectedEnvironment, folder: Path) -> PlayedEpisodes:
        ...

class HooksContract:
    plugin: ClassVar[str]

    @pytest.fixture(scope='class')
    @classmethod
    def ref(cls) -> PluginRef:
        ...

class PromptsContract(ComponentContract):
    kind = 'prompts'
    may_be_empty: ClassVar[bool] = False

    @pytest.fixture(scope='class')
    @classmethod
    def source(cls, selected: Selected, config: BaseModel, folder: Path) -> PromptSource:
        ...

class RewardContract(ComponentContract):
    kind = 'rewards'
    deterministic: ClassVar[bool] = True
    looks_at_batch: ClassVar[bool] = False
    timeout_seconds: ClassVar[float] = 60.0

    @pytest.fixture(scope='class')
    @classmethod
    def rollouts(cls) -> Sequence[Rollout]:
        ...

    @pytest.fixture(scope='class')
    @classmethod
    def scorer(cls, selected: Selected, config: BaseModel, rlhf_device: str) -> Iterator[RewardScorer]:
        ...

class StrategyContract(ComponentContract):
    kind = 'strategies'
    num_processes: ClassVar[int] = 1
    exact: ClassVar[bool] = True

    @pytest.fixture(scope='class')
    @classmethod
    def seen(cls, selected: Selected, given: dict[str, Any], rlhf_device: str, folder: Path) -> dict[str, Any]:
        ...

class TransportContract(ComponentContract):
    kind = 'transports'
    run: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def run_file(cls, given: Mapping[str, Any], episodes: int, rewards: list[dict[str, Any]] | None=None) -> dict[str, Any]:
        ...

    @pytest.fixture(scope='class')
    @classmethod
    def finished(cls, selected: Selected, given: dict[str, Any], folder: Path) -> TrainResult:
        ...
