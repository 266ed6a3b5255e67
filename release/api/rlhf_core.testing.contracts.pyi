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

    def test_it_learns_from_rollouts(self, selected: Selected) -> None:
        ...

    def test_terms_train_its_roles(self, bench: RolloutBench) -> None:
        ...

    def test_advantages_are_numbers_for_every_action(self, bench: RolloutBench) -> None:
        ...

    def test_advantages_are_pure(self, bench: RolloutBench) -> None:
        ...

    def test_ranks_compute_what_one_computes(self, bench: RolloutBench) -> None:
        ...

    def test_scores_that_are_all_the_same(self, bench: RolloutBench) -> None:
        ...

    def test_loss_is_sums_and_counts(self, bench: RolloutBench) -> None:
        ...

    def test_log_probs_of_the_loss(self, bench: RolloutBench) -> None:
        ...

    def test_micro_batches_do_not_change_the_gradient(self, bench: RolloutBench) -> None:
        ...

    def test_a_masked_item_adds_nothing(self, bench: RolloutBench) -> None:
        ...

    def test_better_answers_become_likelier(self, bench: RolloutBench) -> None:
        ...

    def test_groups_are_kept_or_refused(self, bench: RolloutBench) -> None:
        ...

    def test_state_survives_a_checkpoint(self, bench: RolloutBench) -> None:
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

    def test_one_distribution_gives_the_name(self, selected: Selected) -> None:
        ...

    def test_summary_is_one_line(self, selected: Selected) -> None:
        ...

    def test_unknown_options_are_refused(self, selected: Selected, given: dict[str, Any]) -> None:
        ...

    def test_options_leave_cores_names_alone(self, selected: Selected) -> None:
        ...

    def test_options_are_described(self, selected: Selected) -> None:
        ...

    def test_options_come_back_from_a_run_folder(self, selected: Selected, config: BaseModel) -> None:
        ...

    def test_importing_it_is_light(self, selected: Selected) -> None:
        ...

    def test_component_is_whole(self, selected: Selected) -> None:
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

    def test_it_learns_from_a_dataset(self, selected: Selected) -> None:
        ...

    def test_terms_train_its_roles(self, bench: DatasetBench) -> None:
        ...

    def test_items_know_their_length(self, bench: DatasetBench) -> None:
        ...

    def test_a_wrong_line_is_an_error_that_says_so(self, bench: DatasetBench) -> None:
        ...

    def test_loss_is_sums_and_counts(self, bench: DatasetBench) -> None:
        ...

    def test_micro_batches_do_not_change_the_gradient(self, bench: DatasetBench) -> None:
        ...

    def test_a_masked_item_adds_nothing(self, bench: DatasetBench) -> None:
        ...

    def test_the_loss_falls(self, bench: DatasetBench) -> None:
        ...

    def test_state_survives_a_checkpoint(self, bench: DatasetBench) -> None:
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

    @pytest.mark.parametrize('sampling', [PLAIN, WARM], ids=['plain', 'warm'])
    def test_completions_are_well_formed(self, bench: Bench, sampling: SamplingParams) -> None:
        ...

    def test_turns_of_one_sample(self, bench: Bench) -> None:
        ...

    @pytest.mark.parametrize('temperature', [1.0, 0.7])
    def test_log_probs_are_those_sampled_from(self, bench: Bench, temperature: float) -> None:
        ...

    def test_truncated_sampling_says_what_it_kept(self, bench: Bench) -> None:
        ...

    def test_greedy_takes_the_likeliest(self, bench: Bench) -> None:
        ...

    def test_a_sample_is_the_same_alone_and_again(self, bench: Bench) -> None:
        ...

    def test_samples_of_one_prompt_differ(self, bench: Bench) -> None:
        ...

    def test_a_stop_text_ends_an_answer_and_stays_in_it(self, bench: Bench) -> None:
        ...

    def test_max_length_counts_the_prompt(self, bench: Bench) -> None:
        ...

    def test_weights_changed_in_place(self, bench: Bench) -> None:
        ...

    def test_weights_that_arrive_in_chunks(self, bench: Bench) -> None:
        ...

    def test_half_a_version_is_refused_whole(self, bench: Bench) -> None:
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

    def test_episodes_end(self, episodes: PlayedEpisodes) -> None:
        ...

    def test_bounds_are_kept(self, episodes: PlayedEpisodes) -> None:
        ...

    def test_a_turn_goes_on_where_the_last_one_ended(self, episodes: PlayedEpisodes) -> None:
        ...

    def test_what_was_sampled_is_learnt_and_nothing_else(self, episodes: PlayedEpisodes) -> None:
        ...

    def test_each_branch_is_there_once(self, episodes: PlayedEpisodes) -> None:
        ...

    def test_the_samples_of_a_prompt_begin_alike(self, episodes: PlayedEpisodes) -> None:
        ...

    def test_the_same_seeds_give_the_same_episodes(self, environment: SelectedEnvironment, folder: Path, episodes: PlayedEpisodes) -> None:
        ...

    def test_an_episode_does_not_look_at_others(self, environment: SelectedEnvironment, folder: Path, episodes: PlayedEpisodes) -> None:
        ...

    def test_it_plays_in_a_process_of_its_own(self, environment: SelectedEnvironment, folder: Path, episodes: PlayedEpisodes) -> None:
        ...

class HooksContract:
    plugin: ClassVar[str]

    @pytest.fixture(scope='class')
    @classmethod
    def ref(cls) -> PluginRef:
        ...

    def test_its_hooks_exist(self, ref: PluginRef) -> None:
        ...

    def test_a_run_with_it_is_done(self, ref: PluginRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ...

class PromptsContract(ComponentContract):
    kind = 'prompts'
    may_be_empty: ClassVar[bool] = False

    @pytest.fixture(scope='class')
    @classmethod
    def source(cls, selected: Selected, config: BaseModel, folder: Path) -> PromptSource:
        ...

    def test_it_is_a_prompt_source(self, selected: Selected, source: PromptSource) -> None:
        ...

    def test_records_are_prompts(self, source: PromptSource) -> None:
        ...

    def test_core_reads_it_to_the_end(self, source: PromptSource) -> None:
        ...

    def test_a_record_stays_the_same(self, source: PromptSource) -> None:
        ...

    def test_every_process_builds_the_same(self, selected: Selected, config: BaseModel, folder: Path, source: PromptSource) -> None:
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

    def test_one_finite_number_for_every_answer(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        ...

    def test_each_answer_alone(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        ...

    def test_the_order_of_answers_is_kept(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        ...

    def test_the_same_answer_gets_the_same_score(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        ...

    def test_rollouts_are_left_as_they_are(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        ...

    def test_scores_in_a_process_of_its_own(self, selected: Selected, config: BaseModel, rlhf_device: str, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        ...

class StrategyContract(ComponentContract):
    kind = 'strategies'
    num_processes: ClassVar[int] = 1
    exact: ClassVar[bool] = True

    @pytest.fixture(scope='class')
    @classmethod
    def seen(cls, selected: Selected, given: dict[str, Any], rlhf_device: str, folder: Path) -> dict[str, Any]:
        ...

    def test_it_trains_as_plain_torch(self, seen: dict[str, Any]) -> None:
        ...

    def test_clipping_is_optional_and_the_norm_is_that_before_it(self, seen: dict[str, Any]) -> None:
        ...

    def test_lora_trains_adapters_only(self, seen: dict[str, Any]) -> None:
        ...

    def test_shards_are_whole_named_and_bounded(self, seen: dict[str, Any]) -> None:
        ...

    def test_it_resumes_exactly(self, seen: dict[str, Any]) -> None:
        ...

    def test_a_gradient_that_is_not_finite_changes_nothing_anywhere(self, seen: dict[str, Any]) -> None:
        ...

    def test_dropped_gradients_leave_no_trace(self, seen: dict[str, Any]) -> None:
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

    def test_the_run_is_done(self, finished: TrainResult) -> None:
        ...

    def test_one_line_for_each_update(self, finished: TrainResult) -> None:
        ...

    def test_no_sample_is_lost_or_doubled(self, finished: TrainResult) -> None:
        ...

    def test_the_model_can_be_loaded(self, finished: TrainResult) -> None:
        ...

    def test_a_failing_run_fails(self, selected: Selected, given: dict[str, Any], tmp_path: Path) -> None:
        ...
