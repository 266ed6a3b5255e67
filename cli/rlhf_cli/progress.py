"""Progress of a run: live bars in a terminal, plain lines in a pipe, only the summary with `--quiet`.

A hook plugin. Plain lines are not truncated. If the reader closes the pipe (`| head`) or the terminal, printing stops
and the run continues.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rlhf_core.config.evaluation import score_name
from rlhf_core.hookspecs import FitInfo, Metrics, hookimpl
from rlhf_core.util.redact import printable

from .numbers import readable
from .output import PipeSafeStream

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SHOWN = (("reward/mean", "reward"), ("kl/mean", "kl"), ("response/length_mean", "length"))


class RunProgress:
    """Shows bars or one line per episode, one line per evaluation, and a summary at the end."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        """Set up the output.

        Args:
            stream: Default is standard output.
            quiet: Print only the summary.
        """
        self._stream = cast(TextIO, PipeSafeStream(stream or sys.stdout))
        self._quiet = quiet
        self._has_bars = self._stream.isatty() and not quiet
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._info = FitInfo(algorithm="", num_episodes=0)
        self._started = 0.0
        self._line: dict[str, Any] = {}
        self._first_reward: float | None = None
        self._score_name: str | None = None

    @hookimpl
    def rlhf_run_start(self, config: Metrics) -> None:
        self._score_name = score_name(config)

    @hookimpl
    def rlhf_fit_start(self, info: FitInfo) -> None:
        """Reset the state. One object may see several fits, such as the stages of the quickstart."""
        self._info = info
        self._started = time.monotonic()
        self._line = {}
        self._first_reward = None
        if self._quiet:
            return
        sizes = ", ".join(f"{role} {count:,}" for role, count in info.num_parameters.items())
        resumed = f", from episode {info.first_episode + 1}" if info.first_episode else ""
        self.print_line(
            f"{info.algorithm}: {info.num_episodes} episodes{resumed} on {info.device}"
            + (f" x {info.world_size}" if info.world_size > 1 else "")
            + (f", parameters: {sizes}" if sizes else "")
        )
        if self._has_bars:
            from .bars import make_bars

            self._bars, self._tasks = make_bars(self._stream, info)
            self._bars.start()

    @hookimpl
    def rlhf_episode_start(self) -> None:
        if self._bars is not None:
            self._bars.reset(self._tasks["rollout"])
            self._bars.reset(self._tasks["update"])

    @hookimpl
    def rlhf_make_experience_end(self, num_samples: int) -> None:
        self._advance("rollout", num_samples)

    @hookimpl
    def rlhf_update_end(self, metrics: Metrics | None) -> None:
        self._advance("update", 1, shown(metrics or {}))

    @hookimpl
    def rlhf_episode_end(self, episode: int, metrics: Metrics | None, error: BaseException | None) -> None:
        if error is not None or metrics is None:
            return
        self._line.update(metrics)
        if self._first_reward is None:
            self._first_reward = metrics.get("reward/mean")
        self._advance("episode", 1, shown(metrics, with_losses=False))
        if self._bars is None and not self._quiet:
            self.print_line(self._episode_line(episode, metrics))

    @hookimpl
    def rlhf_eval_end(self, step: int, metrics: Metrics | None, error: BaseException | None) -> None:
        if error is None and metrics and not self._quiet:
            values = "  ".join(f"{key.removeprefix('eval/')} {readable(value, key)}" for key, value in metrics.items())
            self.print_line(f"held-out after {step} updates: {values}")

    @hookimpl
    def rlhf_fit_end(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    @hookimpl
    def rlhf_run_end(self, run_folder: Path, summary: Metrics | None) -> None:
        rows = self._summary_rows(run_folder, summary or {})
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.print_line(f"{name:<{width}}  {value}")

    def print_line(self, line: str) -> None:
        """Print a line immediately, above the bars."""
        if self._bars is not None:
            self._bars.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
        else:
            print(printable(line), file=self._stream, flush=True)

    def _advance(self, bar: str, amount: int, values: Sequence[str] = ()) -> None:
        """Advance a bar, if there are bars, and show `values` next to it."""
        if self._bars is not None:
            self._bars.update(self._tasks[bar], advance=amount, values="  ".join(values))

    def _summary_rows(self, run_folder: Path, summary: Metrics) -> list[tuple[str, str]]:
        rows = [("status", str(summary.get("status", "failed")))]
        if finished := summary.get("finished"):
            rows.append(("finished", f"{finished['guard']}: {finished['reason']}"))
        before, after = summary.get("eval_before"), summary.get("eval_after")
        if before is not None or after is not None:
            rows.append((f"held-out {self._score_name or 'score'}", f"{readable(before)} -> {readable(after)}"))
        reward = self._line.get("reward/mean")
        if reward is not None:
            rows.append(("reward", f"{readable(self._first_reward)} -> {readable(reward)}"))
        if self._line.get("kl/mean") is not None:
            rows.append(("kl", readable(self._line["kl/mean"])))
        if summary.get("wall_s") is not None:
            rows.append(("wall time", clock(float(summary["wall_s"]))))
        rows.append(("run folder", str(run_folder)))
        return rows

    def _episode_line(self, episode: int, metrics: Mapping[str, Any]) -> str:
        width = len(str(self._info.num_episodes))
        parts = [f"episode {episode + 1:>{width}}/{self._info.num_episodes}", *shown(metrics)]
        done = episode + 1 - self._info.first_episode
        seconds = (time.monotonic() - self._started) / max(1, done)
        parts.append(f"{seconds:.2f} s/episode")
        left = self._info.num_episodes - episode - 1
        if left > 0:
            parts.append(f"{clock(left * seconds)} left")
        return "  ".join(parts)


def quiet_progress() -> RunProgress:
    """Create the progress for `--quiet`, which shows only how the run ended."""
    return RunProgress(quiet=True)


def shown(metrics: Mapping[str, Any], *, with_losses: bool = True) -> list[str]:
    """Return an episode's main values, if present: reward, KL, length, losses.

    Args:
        metrics: Metrics of an update or an episode, by name.
        with_losses: Include the losses.

    Example:
        >>> shown({"reward/mean": 0.5, "loss/policy": 0.01, "policy/entropy": 1.2})
        ['reward 0.500', 'loss policy 0.010']
    """
    values = [(label, metrics.get(key)) for key, label in _SHOWN]
    if with_losses:
        values += [(key.replace("loss/", "loss "), value) for key, value in metrics.items() if key.startswith("loss/")]
    return [f"{label} {readable(value)}" for label, value in values if isinstance(value, int | float)]


def clock(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> clock(4.2), clock(125.0), clock(3720.0)
        ('4.2 s', '2 min 05 s', '1 h 02 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
