"""Reads the data of a report from run folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.runfolder import RunFolder
from rlhf_core.util import read_lines, redact_mapping
from rlhf_pages import known_line, known_sample, known_values

from .samples import SampleChoice, choose_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Data of one run. Missing files leave their fields empty."""

    path: Path
    name: str
    lines: Sequence[Mapping[str, Any]]
    """The evaluation before training as step 0, then `metrics.jsonl`, in order of `step`."""
    samples: SampleChoice
    config: Mapping[str, Any]
    """The run file without secrets."""
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def is_running(self) -> bool:
        """Whether it is in progress or was killed. Its summary is then the one written at its start."""
        return self.summary.get("status") == "running"

    def keys(self) -> list[str]:
        """Metric names, in order of first appearance."""
        return list(dict.fromkeys(key for line in self.lines for key in line))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, for the lines that contain it."""
        points = [(int(line["step"]), line[key]) for line in self.lines if key in line]
        return [step for step, _ in points], [float(value) for _, value in points]

    def last(self, key: str) -> float | None:
        """The newest value of a metric, None if it never occurs."""
        _, values = self.series(key)
        return values[-1] if values else None


def read_run(path: Path) -> Run:
    """Read a run folder. Raises `UserInputError` if it is not one, `DataError` if a file is damaged."""
    folder = RunFolder.read(Path(path))
    summary = known_values(folder.read_json(folder.summary))
    before = {"eval/score": summary.get("eval_before"), **folder.read_json(folder.evaluation_before), "step": 0}
    return Run(
        path=folder.path,
        name=folder.path.resolve().name,
        lines=[line for line in map(known_line, (before, *read_lines(folder.metrics))) if line is not None],
        samples=choose_samples(read_samples(folder)),
        config=redact_mapping(folder.read_config()),
        manifest=folder.read_json(folder.manifest),
        summary=summary,
    )


def is_number(value: Any) -> bool:
    """Whether a value of a `Run` is a number. All of them are finite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_samples(folder: RunFolder) -> Iterator[Mapping[str, Any]]:
    """Yield the displayable samples of a run. Raises `DataError` if a line is not JSON."""
    return (sample for sample in map(known_sample, read_lines(folder.samples)) if sample is not None)
