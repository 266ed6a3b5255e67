"""The hook plugin `performance`: measures a run's throughput and its time per phase.

Everything is derived from public hook events: the times and throughputs on an episode's last line, and the wall clock
between an episode's start and end. Floating-point operations are the usual estimate for transformers (Kaplan et al.
2020, arXiv:2001.08361, section 2.1): 2·N for each token in a forward pass, and 6·N for each trained token, or 8·N
with gradient checkpointing. Attention scores and prompt prefill are not counted, so the figures are lower bounds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core import Section
from rlhf_core.components import HookContext
from rlhf_core.hookspecs import FitInfo, Metrics, hookimpl
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import write_json

logger = logging.getLogger("rlhf.performance")
_PHASES = ("rollout", "reward", "train", "sync")


@dataclass
class _Totals:
    """Sums over the completed episodes."""

    episodes: int = 0
    wall_s: float = 0.0
    time_s: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: float = 0.0


class PerformanceEvaluator:
    """Measures a fit, logs a one-line summary, and writes `performance.json` if `folder` is a run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        self._info = FitInfo(algorithm="", num_episodes=0)
        self._totals = _Totals()
        self._started = 0.0

    @hookimpl
    def rlhf_fit_start(self, info: FitInfo) -> None:
        self._info = info
        self._totals = _Totals()

    @hookimpl
    def rlhf_episode_start(self) -> None:
        self._started = time.perf_counter()

    @hookimpl
    def rlhf_episode_end(self, metrics: Metrics | None, error: BaseException | None) -> None:
        if error is not None or metrics is None:
            return
        totals = self._totals
        totals.episodes += 1
        totals.wall_s += time.perf_counter() - self._started
        for phase in (*_PHASES, *(["environment"] if "time/environment_s" in metrics else [])):
            seconds = float(metrics.get(f"time/{phase}_s") or 0.0)
            totals.time_s[phase] = totals.time_s.get(phase, 0.0) + seconds
            rate = float(metrics.get(f"tokens_per_second/{phase}") or 0.0)
            totals.tokens[phase] = totals.tokens.get(phase, 0.0) + rate * seconds
        totals.peak_memory_bytes = max(totals.peak_memory_bytes, float(metrics.get("memory/peak_bytes") or 0.0))

    @hookimpl
    def rlhf_fit_end(self) -> None:
        figures = self.figures()
        if not figures:
            return
        if self._folder.holds_run:
            write_json(self._folder.performance, figures)
        logger.info(describe(figures))

    def figures(self) -> dict[str, Any]:
        """Return the figures so far, as in `performance.json`. Empty before the first completed episode."""
        totals, info = self._totals, self._info
        if not totals.episodes or totals.wall_s <= 0:
            return {}
        busy = sum(totals.time_s.values())
        figures: dict[str, Any] = {
            "episodes": totals.episodes,
            "seconds_per_episode": totals.wall_s / totals.episodes,
            "time_s": dict(totals.time_s),
            "time_share": {
                **{phase: seconds / totals.wall_s for phase, seconds in totals.time_s.items()},
                "idle": max(0.0, 1.0 - busy / totals.wall_s),
            },
            "tokens_per_second": _rates(totals.tokens, totals.time_s),
            "tflop_per_second": _rates(self._tflop(), totals.time_s),
        }
        if info.samples_per_episode:
            figures["samples_per_second"] = info.samples_per_episode * totals.episodes / totals.wall_s
        if totals.peak_memory_bytes:
            figures["peak_memory_bytes"] = totals.peak_memory_bytes
        return figures

    def _tflop(self) -> dict[str, float]:
        size, tokens = self._info.num_parameters, self._totals.tokens
        trained = size.get("policy", 0) + size.get("critic", 0)
        per_token = 8 if self._info.gradient_checkpointing else 6
        return {
            "rollout": 2 * sum(size.values()) * tokens.get("rollout", 0.0) / 1e12,
            "train": per_token * trained * tokens.get("train", 0.0) / 1e12,
        }


def build(config: Section, context: HookContext) -> PerformanceEvaluator:
    """Return the hook plugin."""
    return PerformanceEvaluator(context.run_folder)


def describe(figures: Mapping[str, Any]) -> str:
    """Format the figures as one line."""
    parts = [f"{figures['seconds_per_episode']:.2f} s per episode"]
    if "samples_per_second" in figures:
        parts.append(f"{figures['samples_per_second']:.1f} samples/s")
    parts += [f"{phase} {rate:,.0f} tokens/s" for phase, rate in figures["tokens_per_second"].items()]
    parts += [f"{phase} {rate:.3g} TFLOP/s" for phase, rate in figures["tflop_per_second"].items() if rate]
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in figures["time_share"].items())
    return f"{'; '.join(parts)}; time: {shares}"


def _rates(amounts: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: amount / seconds[name] for name, amount in amounts.items() if amount and seconds.get(name, 0.0) > 0}
