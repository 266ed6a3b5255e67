"""Passes the metrics of a run to a logger. `metrics.jsonl` is always written and does not need one."""

from __future__ import annotations

from ..hookspecs import Metrics, hookimpl
from ..protocols import Logger


class LoggerHook:
    """Calls a logger from the hooks of a run."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    @hookimpl
    def rlhf_metrics(self, line: Metrics) -> None:
        self._logger.log(int(line["step"]), _scalars(line))

    @hookimpl
    def rlhf_fit_end(self, error: BaseException | None) -> None:
        self._logger.finish(error is not None)


def _scalars(line: Metrics) -> dict[str, float]:
    """Return the numbers of a line that a dashboard plots. Null (not finite) and structured values are left out."""
    return {name: float(value) for name, value in line.items() if name != "step" and isinstance(value, int | float)}
