PREFIX = 'rlhf_'

hookimpl = pluggy.HookimplMarker(PROJECT)

Metrics = Mapping[str, Any]

@dataclass(frozen=True, slots=True, kw_only=True)
class FitInfo:
    algorithm: str
    num_episodes: int
    first_episode: int = 0
    samples_per_episode: int | None = None
    updates_per_episode: int | None = None
    num_parameters: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 1
    device: str = 'cpu'
    gradient_checkpointing: bool = False

@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    action: Literal['skip', 'stop', 'rollback']
    guard: str
    reason: str

class SetupHooks:

    @hookspec
    def rlhf_transform_config(self, config: dict[str, Any]) -> Mapping[str, Any] | None:
        ...

    @hookspec
    def rlhf_run_start(self, run_folder: Path, config: Metrics) -> None:
        ...

    @hookspec
    def rlhf_run_end(self, run_folder: Path, config: Metrics, summary: Metrics | None, error: BaseException | None) -> None:
        ...

class TrainerHooks:

    @hookspec
    def rlhf_fit_start(self, info: FitInfo) -> None:
        ...

    @hookspec
    def rlhf_fit_end(self, info: FitInfo, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_episode_start(self, episode: int) -> None:
        ...

    @hookspec
    def rlhf_episode_end(self, episode: int, metrics: Metrics | None, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_epoch_start(self, episode: int, epoch: int) -> None:
        ...

    @hookspec
    def rlhf_epoch_end(self, episode: int, epoch: int, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_batch_start(self, episode: int, epoch: int, batch: int, experience: Any) -> None:
        ...

    @hookspec
    def rlhf_batch_end(self, episode: int, epoch: int, batch: int, experience: Any, metrics: Metrics | None, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_update_start(self, step: int) -> None:
        ...

    @hookspec
    def rlhf_update_end(self, step: int, metrics: Metrics | None, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_verdict(self, step: int, episode: int, metrics: Metrics, error: BaseException | None) -> Verdict | None:
        ...

    @hookspec
    def rlhf_sync_start(self, version: int) -> None:
        ...

    @hookspec
    def rlhf_sync_end(self, version: int, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_eval_start(self, step: int) -> None:
        ...

    @hookspec
    def rlhf_eval_end(self, step: int, metrics: Metrics | None, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_metrics(self, line: Metrics) -> None:
        ...

    @hookspec
    def rlhf_checkpoint_saved(self, path: Path, step: int, episode: int) -> None:
        ...

class MakerHooks:

    @hookspec
    def rlhf_maker_loop_start(self, maker: int) -> None:
        ...

    @hookspec
    def rlhf_maker_loop_end(self, maker: int, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_make_experience_start(self, num_prompts: int, num_samples: int) -> None:
        ...

    @hookspec
    def rlhf_make_experience_end(self, num_prompts: int, num_samples: int, groups: Sequence[RolloutGroup] | None, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_rollout_batch_start(self, num_samples: int) -> None:
        ...

    @hookspec
    def rlhf_rollout_batch_end(self, num_samples: int, num_tokens: int | None, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_reward_start(self, num_samples: int) -> None:
        ...

    @hookspec
    def rlhf_reward_end(self, num_samples: int, error: BaseException | None) -> None:
        ...

    @hookspec
    def rlhf_send_start(self, num_groups: int) -> None:
        ...

    @hookspec
    def rlhf_send_end(self, num_groups: int, error: BaseException | None) -> None:
        ...
