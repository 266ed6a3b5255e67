"""What an episode leaves behind: metrics lines, samples, times. On rank 0 it writes; elsewhere it only counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from ..hooks.relay import HookRelay
from ..runfolder.folder import RunFolder
from ..runfolder.metrics import MetricsWriter, PhaseTimer
from ..runfolder.samples import Keep, SampleRecord, SampleWriter
from ..strategy import Strategy
from ..types import BufferItem, MadeEpisode, sum_by_key
from ..util.host_memory import peak_resident_bytes
from .updater import GAP_KEY


class EpisodeRecord:
    """Collects the values of an episode and writes them when they are known."""

    def __init__(self, metrics: MetricsWriter | None, samples: SampleWriter | None, stack: ExitStack) -> None:
        self._metrics = metrics
        self._samples = samples
        self._stack = stack
        self._is_first_update = True
        self._response_tokens = 0
        self._train_tokens = 0
        self._reward_calls: dict[str, float] = {}
        self.values: dict[str, float] = {}
        """Of the episode and of its newest update."""
        self.timer = PhaseTimer()

    @classmethod
    def open(
        cls, folder: RunFolder | None, hooks: HookRelay, *, step: int, episode: int, keep_samples: Keep
    ) -> EpisodeRecord:
        """`folder` None: nothing is written. What lies after `step` and `episode` (a resume) is cut."""
        stack = ExitStack()
        if folder is None:
            return cls(None, None, stack)

        def on_line(line: Mapping[str, Any]) -> None:
            hooks.fire("metrics", line=line)

        metrics = stack.enter_context(MetricsWriter.resume(folder.metrics, step=step, on_line=on_line))
        samples = stack.enter_context(SampleWriter.resume(folder.samples, episode=episode, keep=keep_samples))
        return cls(metrics, samples, stack)

    def __enter__(self) -> EpisodeRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def rollouts(self, episode: int, made: MadeEpisode, items: Sequence[BufferItem]) -> None:
        """An episode's samples, with their combined scores, are about to be trained on."""
        self.timer.add("rollout", made.times.rollout_s + made.times.forward_s)
        self.timer.add("reward", made.times.reward_s)
        self._response_tokens = made.times.response_tokens
        self._reward_calls = made.times.reward_calls
        self._train_tokens = sum(item.num_tokens for item in items)
        if self._samples is None:
            return
        scored = {item.sample_id: item for item in items}
        self._samples.write(
            [
                SampleRecord.of(
                    rollout,
                    episode=episode,
                    rewards=scored[rollout.sample_id].rewards,
                    score=scored[rollout.sample_id].score,
                )
                for group in made.groups
                for rollout in group.rollouts
            ]
        )

    def items(self, episode: int, items: Sequence[Any]) -> None:
        """An episode of a dataset is about to be trained on."""
        self._train_tokens = sum(item.num_tokens for item in items)

    def start_episode(self, episode: int, version: int | None, metrics: Mapping[str, float]) -> None:
        self._is_first_update = True
        self.values = dict(metrics)
        if self._metrics is not None:
            self._metrics.start_episode(episode=episode, policy_version=version, values=metrics)

    def update(self, metrics: Mapping[str, float]) -> None:
        values = dict(metrics)
        self.values.update(values)
        if self._metrics is None:
            return
        if self._is_first_update and GAP_KEY in values:
            self._metrics.add_episode_values({GAP_KEY: values.pop(GAP_KEY)})
        self._is_first_update = False
        self._metrics.update(values)

    def end_episode(self, strategy: Strategy) -> dict[str, float]:
        """Times (of rank 0), throughput and calls to rewards (of all ranks), memory (of the fullest). Collective.

        Returns all values of the episode's last line.
        """
        import torch

        times = self.timer.take()
        totals = strategy.all_reduce(torch.tensor([float(self._response_tokens)], dtype=torch.float64))
        peak = strategy.all_reduce(torch.tensor([peak_memory_bytes(strategy.device)], dtype=torch.float64), "max")
        values = {**times, "memory/peak_bytes": peak.item()}
        if rollout_s := times.get("time/rollout_s"):
            values["tokens_per_second/rollout"] = totals.item() / rollout_s
        if train_s := times.get("time/train_s"):
            values["tokens_per_second/train"] = self._train_tokens / train_s
        values |= sum_by_key(strategy.all_gather_objects(self._reward_calls))
        if self._metrics is not None:
            self._metrics.end_episode(values)
        return {**self.values, **values}

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Held-out scores, on the episode's last line; guards may have skipped all of them."""
        if self._metrics is not None and self._metrics.holds_line:
            self._metrics.evaluation(metrics)

    def flush(self, *, durable: bool = False) -> None:
        """Write the last line of the episode; `durable` before a checkpoint that counts on it."""
        if self._metrics is not None:
            self._metrics.flush(sync=durable)
        if durable and self._samples is not None:
            self._samples.flush()


def peak_memory_bytes(device: Any) -> float:
    """Most memory held so far: of the GPU where there is one, else of this process."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(peak_resident_bytes())
