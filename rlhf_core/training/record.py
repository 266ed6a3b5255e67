"""Records of episodes: metrics lines, samples, times. Rank 0 writes; other ranks only count."""

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
    """Collects the values of an episode, and writes them when they are known. Use as a context manager.

    `metrics.jsonl` has exactly one line per update. A line is held back until the next event shows whether it is the
    last of its episode, which gets times and held-out scores. The order of calls in an episode:

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
        """metrics: takes the lines; those after `step`, the last update so far, are cut. None: nothing is written.

        hooks: are told of each written line. count: see `RunLines`, also for the errors.
        """
        instead = "start anew with another --output"
        self._metrics = None if metrics is None else RunLines(metrics, "step", step, count=count, instead=instead)
        self._hooks = hooks
        self._step = step
        self._episode: dict[str, Any] = {}
        self._held: dict[str, Any] | None = None
        self._samples: RunLines | None = None
        self._watch: FileWatch | None = None
        self._logging = LoggingConfig()
        self._made = PhaseTimes()
        self._train_tokens = 0
        self.values: dict[str, float] = {}
        """Values of the episode and of its newest update."""
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
        """The record of a run folder. Lines after `step` and `episode` (on a resume) are removed.

        Raises:
            CheckpointError: of the `step` lines of metrics and the `num_samples` of samples (None: unknown) that the
                checkpoint counts, some are missing.
        """
        with ExitStack() as opened:
            record = opened.enter_context(cls(folder.metrics, hooks, step=step, count=step))
            count = None if logging.samples == "none" else num_samples
            instead = "write no more of them: --set logging.samples=none"
            record._samples = RunLines(folder.samples, "episode", episode, count=count, instead=instead)
            opened.pop_all()
        record._watch, record._logging = FileWatch(folder), logging
        return record

    @property
    def num_samples(self) -> int:
        """Lines of `samples.jsonl`."""
        return 0 if self._samples is None else self._samples.num_lines

    def __enter__(self) -> EpisodeRecord:
        return self

    def __exit__(self, *error: object) -> None:
        with self._metrics or nullcontext(), self._samples or nullcontext():
            self._write_held()

    def texts(self, num_rows: int) -> Sequence[int]:
        """The rows, of `num_rows` in an episode, whose rollouts `rollouts` needs."""
        return () if self._samples is None else choose(range(num_rows), self._logging.samples)

    def rollouts(self, episode: int, made: CollectedEpisode, estimated: EstimatedEpisode) -> None:
        """Record an episode's samples, with their combined scores, before training on them."""
        self.timer.add("rollout", made.times.rollout_s + made.times.forward_s)
        self.timer.add("reward", made.times.reward_s)
        if made.times.environment_s:
            self.timer.add("environment", made.times.environment_s)
        self._made = made.times
        self._train_tokens = sum(row.num_tokens for row in made.rows)
        if self._samples is None:
            return
        chosen = self.texts(len(made.rows))
        lines = [
            sample_line(
                rollout,
                episode=episode,
                rewards=row.rewards,
                score=score,
                plays=ENVIRONMENT in row.columns,
                tokens=self._logging.sample_tokens,
            )
            for rollout, index in zip(estimated.rollouts, chosen, strict=True)
            for row, score in [(made.rows[index], estimated.scores[index])]
        ]
        self._samples.append(lines)

    def items(self, items: Sequence[Any]) -> None:
        """Record a dataset episode's items before training on them."""
        self._train_tokens = sum(item.num_tokens for item in items)

    def start_episode(self, episode: int, version: int | None, metrics: Mapping[str, float]) -> None:
        """Begin an episode; its `metrics` (`reward/*`, `kl/*`, `response/*`, …) are put on each of its lines."""
        self._write_held()
        self.values = dict(metrics)
        self._episode = {"episode": episode, **({} if version is None else {"policy_version": version}), **metrics}

    def update(self, metrics: Mapping[str, float]) -> None:
        """Add the line of an update."""
        self._write_held()
        self.values.update(metrics)
        if GAP_KEY in metrics:  # of the episode's first forward
            self._episode[GAP_KEY] = metrics[GAP_KEY]
        self._step += 1
        self._held = {"step": self._step, **self._episode, **metrics}

    def end_episode(self, place: Place) -> dict[str, float]:
        """Collect times (rank 0), throughput and reward calls (all ranks), memory (largest of all ranks). Collective.

        Returns all values of the episode's last line.
        """
        import torch

        times, made = self.timer.take(), self._made
        tokens = [made.response_tokens, made.prompt_tokens, made.reused_tokens]
        responses, prompts, reused = place.all_reduce(torch.tensor(tokens, dtype=torch.float64)).tolist()
        peak = place.all_reduce(torch.tensor([peak_memory_bytes(place.device)], dtype=torch.float64), "max")
        values = {**times, "memory/peak_bytes": peak.item()}
        if rollout_s := times.get("time/rollout_s"):
            values["tokens_per_second/rollout"] = responses / rollout_s
        if prompts:
            values["memory/prompt_reused_fraction"] = reused / prompts
        if train_s := times.get("time/train_s"):
            values["tokens_per_second/train"] = self._train_tokens / train_s
        values |= _sum_by_key(place.all_gather_objects(made.reward_calls))
        self.evaluation(values)
        return {**self.values, **values}

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Put held-out scores on the episode's last line, if it has one: guards may have skipped all updates."""
        if self._held is not None:
            self._held.update(metrics)

    def flush(self, *, durable: bool = False) -> None:
        """Write the last line of the episode; `durable` before a checkpoint that depends on it.

        Raises `RlhfError` where files of the run have vanished.
        """
        if self._watch is not None:
            self._watch.check()
        self._write_held()
        for file in (self._metrics, self._samples) if durable else ():
            if file is not None:
                file.sync()

    def _write_held(self) -> None:
        held, self._held = self._held, None
        if held is None or self._metrics is None:
            return
        line = finite(held)
        self._metrics.append([line])
        if self._hooks is not None:
            self._hooks.fire("metrics", line=line)


def peak_memory_bytes(device: Any) -> float:
    """Peak memory so far: of the GPU if there is one, else of this process."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(peak_resident_bytes())


def _sum_by_key(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum of the mappings' values per key, keys in order of first appearance."""
    keys = dict.fromkeys(key for each in counts for key in each)
    return {key: sum(each.get(key, 0.0) for each in counts) for key in keys}
