"""`eval_performance` of a maker: how fast a loop was and what took its time."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhf_core.hookspecs import hookimpl


class MakerPerformance:
    """Tells `announce`, in one line at the end of every loop, samples and tokens per second."""

    def __init__(self, name: str, announce: Callable[[str], object]) -> None:
        self._name = name
        self._announce = announce
        self._started = self._batch_started = self._send_started = 0.0
        self._num_samples = self._num_tokens = 0
        self._rollout_s = self._send_s = 0.0

    @hookimpl
    def rlhf_maker_loop_start(self) -> None:
        self._started = time.perf_counter()
        self._num_samples = self._num_tokens = 0
        self._rollout_s = self._send_s = 0.0

    @hookimpl
    def rlhf_rollout_batch_start(self) -> None:
        self._batch_started = time.perf_counter()

    @hookimpl
    def rlhf_rollout_batch_end(self, num_samples: int, num_tokens: int | None) -> None:
        self._rollout_s += time.perf_counter() - self._batch_started
        self._num_samples += num_samples
        self._num_tokens += num_tokens or 0

    @hookimpl
    def rlhf_send_start(self) -> None:
        self._send_started = time.perf_counter()

    @hookimpl
    def rlhf_send_end(self) -> None:
        self._send_s += time.perf_counter() - self._send_started

    @hookimpl
    def rlhf_maker_loop_end(self) -> None:
        wall = max(time.perf_counter() - self._started, 1e-9)
        self._announce(
            f"{self._name}: {self._num_samples} samples ({self._num_samples / wall:.1f}/s), "
            f"{self._num_tokens} tokens ({self._num_tokens / wall:.0f}/s) in {wall:.1f} s; "
            f"generating {self._rollout_s / wall:.0%}, waiting for trainers {self._send_s / wall:.0%}"
        )
