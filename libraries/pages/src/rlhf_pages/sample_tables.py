"""Loggers with tables of samples: a few answers of an episode, with their rewards."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from rlhf_core import Section
from rlhf_core.hookspecs import FitInfo, Metrics
from rlhf_core.runfolder import RunFolder

from .known import known_sample

_BLOCK_BYTES = 1 << 16


class SampleTableOptions(Section):
    """Options of a logger that logs tables of samples."""

    samples: int = Field(
        0,
        ge=0,
        description="Number of answers in the table of an episode, of those in samples.jsonl, such as 8. Their prompts "
        "and texts are sent to the logger's server. 0: no tables.",
    )
    samples_every_episodes: int = Field(
        10, ge=1, description="Log a table every N episodes, beginning with the first, and after the last episode."
    )


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Answers of an episode: rows of numbers and texts, None for a missing value."""

    columns: Sequence[str]
    """`episode` (from 0), `prompt`, `completion`, `reward` (the combined score), `reward/<name>` of each reward, and
    `length` in tokens."""
    rows: Sequence[Sequence[Any]]


class SampleLogger(ABC):
    """Base of a logger that also logs tables of samples. It passes the events of a run to the methods of a subclass.

    A table has answers of `samples.jsonl`, spread evenly over the episode. It belongs to the episode's last update.

    Example:
        class MyLogger(SampleLogger):
            def __init__(self, config: MyConfig, context: HookContext) -> None:
                super().__init__(config, context.run_folder)

            def log(self, step: int, values: Mapping[str, float]) -> None: ...

            def log_samples(self, step: int, table: SampleTable) -> None: ...

            def finish(self, failed: bool) -> None: ...
    """

    def __init__(self, options: SampleTableOptions, run_folder: Path) -> None:
        """Create a logger.

        Args:
            options: How many answers to log, and how often.
            run_folder: Folder of the run, from which answers are read.
        """
        self._options = options
        self._samples = RunFolder(run_folder).samples
        self._last_episode: int | None = None
        self._step: int | None = None

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of an update, as `Logger.log` does.

        Args:
            step: Number of the update, from 1.
            values: Metric name -> finite number.
        """

    @abstractmethod
    def log_samples(self, step: int, table: SampleTable) -> None:
        """Log answers of an episode, after the metrics of its updates.

        Args:
            step: Number of the episode's last update.
            table: At least one answer.
        """

    @abstractmethod
    def finish(self, failed: bool) -> None:
        """Write queued values and close, as `Logger.finish` does.

        Args:
            failed: Whether the training ended with an error.
        """

    def rlhf_fit_start(self, info: FitInfo) -> None:
        """Note the last episode.

        Args:
            info: Facts about the fit.
        """
        self._last_episode = info.num_episodes - 1

    def rlhf_metrics(self, line: Metrics) -> None:
        """Call `log`.

        Args:
            line: Line of `metrics.jsonl`. Values that are not finite numbers are left out.
        """
        self._step = int(line["step"])
        numbers = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        self.log(self._step, {name: value for name, value in numbers.items() if name != "step"})

    def rlhf_episode_end(self, episode: int, error: BaseException | None) -> None:
        """Call `log_samples` if a table of this episode is due.

        Args:
            episode: Index from 0.
            error: The error that ended the episode, or None.
        """
        number, every = self._options.samples, self._options.samples_every_episodes
        is_due = episode % every == 0 or episode == self._last_episode
        if error is not None or self._step is None or not number or not is_due:
            return
        if table := read_sample_table(self._samples, episode, number):
            self.log_samples(self._step, table)

    def rlhf_fit_end(self, error: BaseException | None) -> None:
        """Call `finish`.

        Args:
            error: The error that ended the training, or None.
        """
        self.finish(error is not None)


def read_sample_table(path: Path, episode: int, number: int) -> SampleTable | None:
    """Return answers of one of the newest episodes of a run, without reading earlier episodes.

    Args:
        path: `samples.jsonl` of the run.
        episode: Index from 0.
        number: Maximum number of answers, spread evenly over the episode.

    Returns:
        The table, or None if the file does not contain answers of the episode.
    """
    records: list[dict[str, Any]] = []
    for line in _lines_from_end(path):
        record = _parse(line)
        if record is None:
            continue
        if record["episode"] < episode:
            break
        if record["episode"] == episode:
            records.append(record)
    if not records:
        return None
    records.reverse()
    count = min(number, len(records))
    chosen = [records[index * len(records) // count] for index in range(count)]
    names = list(dict.fromkeys(name for record in records for name in record.get("rewards", {})))
    return SampleTable(
        columns=["episode", "prompt", "completion", "reward", *(f"reward/{name}" for name in names), "length"],
        rows=[
            [
                episode,
                record.get("prompt"),
                record["completion"],
                record.get("score"),
                *(record.get("rewards", {}).get(name) for name in names),
                record.get("num_tokens"),
            ]
            for record in chosen
        ],
    )


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a sample, or None for a line that is incomplete or not a sample of an episode."""
    try:
        record = json.loads(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    sample = known_sample(record) if isinstance(record, dict) else None
    return sample if sample is not None and "episode" in sample else None


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file from the last to the first. Nothing if it does not exist."""
    if not path.exists():
        return
    with path.open("rb") as file:
        position, rest = file.seek(0, 2), b""
        while position > 0:
            size = min(_BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            first, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
            rest = first
        yield rest
