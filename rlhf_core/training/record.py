"""Records of episodes: metrics lines, samples, times. Rank 0 writes them. Other ranks only count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from ..config.sections import LoggingConfig
from ..hooks.relay import HookRelay
from ..place import Place
from ..rollout.episode_metrics import ENVIRONMENT
from ..runfolder.folder import FileWatch, RunFolder
from ..runfolder.lines import RunLines
from ..runfolder.metrics import PhaseTimer, finite
from ..runfolder.samples import choose, sample_line
from ..types import CollectedEpisode, PhaseTimes
from ..util.host_memory import peak_resident_bytes
from .estimates import EstimatedEpisode
from .updater import GAP_KEY


class EpisodeRecord:
    """Collects the metrics of an episode, and writes them as soon as a line is complete. Use it as a context manager.

    `metrics.jsonl` has exactly one line per update. A line is held back until the next event shows whether it is the
    last of its episode, which also contains times and held-out scores. The order of calls in an episode:

        rollouts (or items) -> start_episode -> update, update, … -> end_episode -> evaluation -> flush
    """

    def __init__(
        self,
        metrics: Path | None = None,
        hooks: HookRelay | None = None,
        *,
        step: int = 0,
        count: int | None = None,
    ) -> None:
        """Open a record. Raises the errors of `RunLines`.

        Args:
            metrics: File of the lines. Lines after `step` are removed. None writes nothing.
            hooks: Receive each written line.
            step: Number of the last update so far.
            count: Number of lines that the file must have. None if unknown.
        """
        instead = "start again with another --output"
        self._metrics = None if metrics is None else RunLines(metrics, "step", step, count=count, instead=instead)
        self._hooks = hooks
        self._step = step
        self._episode: dict[str, Any] = {}
        self._held_line: dict[str, Any] | None = None
        self._samples: RunLines | None = None
        self._watch: FileWatch | None = None
        self._logging = LoggingConfig()
        self._rollout_times = PhaseTimes()
        self._train_tokens = 0
        self.values: dict[str, float] = {}
        """Metrics of the episode and of its newest update."""
        self.timer = PhaseTimer()

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        hooks: HookRelay,
        *,
        step: int,
        episode: int,
        logging: LoggingConfig,
        num_samples: int | None = None,
    ) -> EpisodeRecord:
        """Open the record of a run folder. Lines after `step` and `episode` (on a resume) are removed.

        Raises:
            CheckpointError: The files have fewer lines than the checkpoint counted, `step` of metrics and `num_samples`
                of samples (None if unknown).
        """
        with ExitStack() as opened:
            record = opened.enter_context(cls(folder.metrics, hooks, step=step, count=step))
            count = None if logging.samples == "none" else num_samples
            instead = "stop writing them: --set logging.samples=none"
            record._samples = RunLines(folder.samples, "episode", episode, count=count, instead=instead)
            opened.pop_all()
        record._watch, record._logging = FileWatch(folder), logging
        return record

    @property
    def num_samples(self) -> int:
        """Number of lines of `samples.jsonl`."""
        return 0 if self._samples is None else self._samples.num_lines

    def __enter__(self) -> EpisodeRecord:
        return self

    def __exit__(self, *error: object) -> None:
        with self._metrics or nullcontext(), self._samples or nullcontext():
            self._write_held()

    def texts(self, num_rows: int) -> Sequence[int]:
        """Return the rows of an episode with `num_rows` rows whose rollouts the method `rollouts` needs."""
        return () if self._samples is None else choose(range(num_rows), self._logging.samples)

    def rollouts(self, episode: int, collected: CollectedEpisode, estimated: EstimatedEpisode) -> None:
        """Record an episode's samples, with their combined scores, before training on them."""
        times, rows = collected.times, collected.rows
        self.timer.add("rollout", times.rollout_s + times.forward_s)
        self.timer.add("reward", times.reward_s)
        if times.environment_s:
            self.timer.add("environment", times.environment_s)
        self._rollout_times = times
        self._train_tokens = sum(row.num_tokens for row in rows)
        if self._samples is None:
            return
        lines = [
            sample_line(
                rollout,
                episode=episode,
                rewards=row.rewards,
                score=score,
                plays=ENVIRONMENT in row.columns,
                tokens=self._logging.sample_tokens,
            )
            for rollout, index in zip(estimated.rollouts, self.texts(len(rows)), strict=True)
            for row, score in [(rows[index], estimated.scores[index])]
        ]
        self._samples.append(lines)

    def items(self, items: Sequence[Any]) -> None:
        """Record a dataset episode's items before training on them."""
        self._train_tokens = sum(item.num_tokens for item in items)

    def start_episode(self, episode: int, version: int | None, metrics: Mapping[str, float]) -> None:
        """Begin an episode. Its `metrics` (`reward/*`, `kl/*`, `response/*`, …) are added to each of its lines."""
        self._write_held()
        self.values = dict(metrics)
        self._episode = {"episode": episode, **({} if version is None else {"policy_version": version}), **metrics}

    def update(self, metrics: Mapping[str, float]) -> None:
        """Add the line of an update."""
        self._write_held()
        self.values.update(metrics)
        if GAP_KEY in metrics:  # measured in the episode's first forward pass
            self._episode[GAP_KEY] = metrics[GAP_KEY]
        self._step += 1
        self._held_line = {"step": self._step, **self._episode, **metrics}

    def end_episode(self, place: Place) -> dict[str, float]:
        """Collect times (rank 0), throughput and reward calls (all ranks) and memory (maximum of ranks). Collective.

        Returns all metrics of the episode's last line.
        """
        import torch

        times, rollout = self.timer.take(), self._rollout_times
        tokens = [rollout.response_tokens, rollout.prompt_tokens, rollout.reused_tokens]
        responses, prompts, reused = place.all_reduce(torch.tensor(tokens, dtype=torch.float64)).tolist()
        peak = place.all_reduce(torch.tensor([peak_memory_bytes(place.device)], dtype=torch.float64), "max")
        values = {**times, "memory/peak_bytes": peak.item()}
        if rollout_s := times.get("time/rollout_s"):
            values["tokens_per_second/rollout"] = responses / rollout_s
        if prompts:
            values["memory/prompt_reused_fraction"] = reused / prompts
        if train_s := times.get("time/train_s"):
            values["tokens_per_second/train"] = self._train_tokens / train_s
        values |= _sum_by_key(place.all_gather_objects(rollout.reward_calls))
        self.evaluation(values)
        return {**self.values, **values}

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Add held-out scores to the episode's last line, if it exists: guards may have skipped all updates."""
        if self._held_line is not None:
            self._held_line.update(metrics)

    def flush(self, *, durable: bool = False) -> None:
        """Write the last line of the episode. `durable`: sync the files, before a checkpoint that depends on them.

        Raises `RlhfError` if files of the run were deleted.
        """
        if self._watch is not None:
            self._watch.check()
        self._write_held()
        for file in (self._metrics, self._samples) if durable else ():
            if file is not None:
                file.sync()

    def _write_held(self) -> None:
        line, self._held_line = self._held_line, None
        if line is None or self._metrics is None:
            return
        line = finite(line)
        self._metrics.append([line])
        if self._hooks is not None:
            self._hooks.fire("metrics", line=line)


def peak_memory_bytes(device: Any) -> float:
    """Return the peak memory so far in bytes: of the GPU on a CUDA device, otherwise of this process."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(peak_resident_bytes())


def _sum_by_key(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum the values of the mappings per key. Keys are in order of first appearance."""
    keys = dict.fromkeys(key for each in counts for key in each)
    return {key: sum(each.get(key, 0.0) for each in counts) for key in keys}
