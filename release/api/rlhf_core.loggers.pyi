class PerformanceEvaluator:

    def __init__(self, *, ignore_episodes: int=0, peak_flops: float | None=None, announce: Callable[[str], object] | None=None, folder: Path | None=None) -> None:
        ...

    @hookimpl
    def rlhf_run_start(self, run_folder: Path) -> None:
        ...

    @hookimpl
    def rlhf_fit_start(self, info: FitInfo) -> None:
        ...

    @hookimpl
    def rlhf_episode_start(self) -> None:
        ...

    @hookimpl
    def rlhf_episode_end(self, episode: int, metrics: Metrics | None, error: BaseException | None) -> None:
        ...

    @hookimpl
    def rlhf_fit_end(self) -> None:
        ...

    def figures(self) -> dict[str, Any]:
        ...

class TensorBoardLogger:

    def __init__(self, folder: Path | None=None) -> None:
        ...

    @hookimpl
    def rlhf_run_start(self, run_folder: Path) -> None:
        ...

    @hookimpl
    def rlhf_metrics(self, line: Metrics) -> None:
        ...

    @hookimpl
    def rlhf_episode_end(self) -> None:
        ...

    @hookimpl
    def rlhf_fit_end(self) -> None:
        ...

    @hookimpl
    def rlhf_run_end(self) -> None:
        ...

    def close(self) -> None:
        ...

class WandbLogger:

    def __init__(self, *, project: str='rlhf', name: str | None=None, mode: str | None=None, folder: Path | None=None) -> None:
        ...

    @hookimpl
    def rlhf_run_start(self, run_folder: Path, config: Metrics) -> None:
        ...

    @hookimpl
    def rlhf_fit_start(self, info: FitInfo) -> None:
        ...

    @hookimpl
    def rlhf_metrics(self, line: Metrics) -> None:
        ...

    @hookimpl
    def rlhf_fit_end(self, error: BaseException | None) -> None:
        ...
