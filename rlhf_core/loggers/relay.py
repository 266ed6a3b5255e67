"""Hands the metrics of a run to its loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..components import LoggerContext
from ..config.resolved import Configured
from ..hooks.relay import HookRelay
from ..hookspecs import Metrics, hookimpl
from ..plugins.selected import load
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


def register_loggers(relay: HookRelay, loggers: Sequence[Configured], context: LoggerContext) -> list[str]:
    """Build and register a run's loggers; returns their names."""
    return [
        relay.register(LoggerHook(each.build(each.config, context)), name=f"logger {each.name}") for each in loggers
    ]


def open_logger(name: str, context: LoggerContext, options: Mapping[str, Any] | None = None) -> LoggerHook:
    """The installed logger of that name, as a hook, without a run file. Raises `PluginError`."""
    selected = load("loggers", name)
    config = selected.component.config.model_validate(dict(options or {}))
    return LoggerHook(selected.build(config, context))


def _scalars(line: Metrics) -> dict[str, float]:
    """The numbers of a line that a dashboard plots; null (not finite) and structured values are left out."""
    return {name: float(value) for name, value in line.items() if name != "step" and isinstance(value, int | float)}
