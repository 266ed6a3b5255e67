"""Checks whether a run's strategy and sizes allow a number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError, PluginError
from ..plugins.discovery import Selected, discover, load
from .section import StrategyConfig

if TYPE_CHECKING:
    from .resolved import ResolvedRun


def too_many(strategy: Selected, num_processes: int) -> str | None:
    """Why the strategy cannot train across `num_processes`; None where it can."""
    most = strategy.component.max_processes
    if most is None or num_processes <= most:
        return None
    return f"strategy {strategy.name} is " + ("one process" if most == 1 else f"at most {most} processes")


def other_strategies(num_processes: int) -> str:
    """Hint that names the installed strategies which can train across `num_processes`."""
    found = []
    for ref in discover("strategies").values():
        try:
            most = load(ref.kind, ref.name).component.max_processes
        except PluginError:  # a broken one is no way out
            continue
        if most is None or num_processes <= most:
            found.append(ref.name)
    return f"add --strategy {' or '.join(found)}" if found else "install a strategy that trains across processes"


def processes_per_rank(run: ResolvedRun) -> int:
    """Training processes that compute the same rows together; 1 unless the strategy declares otherwise."""
    config = run.strategy.config
    return config.processes_per_rank() if isinstance(config, StrategyConfig) else 1


def most_ranks(run: ResolvedRun) -> int:
    """Shares of the rows that all have work."""
    return min(run.run.train.prompts_per_episode, run.run.train.train_batch_size)


def check_groups(run: ResolvedRun, num_processes: int) -> None:
    """Raise `ConfigError` where the trainers, `num_processes` unless the transport starts its own, form no groups."""
    own, together = run.own_processes, processes_per_rank(run)
    trainers = num_processes if own is None else own.trainers
    if trainers % together:
        start = f"--num-processes {together}" if own is None else f"--set transport.{own.option}={together}"
        raise ConfigError(
            f"{together} processes train the same rows together, and {trainers} do not form groups of {together}",
            where="strategy",
            hint=f"start a multiple of {together}: {start}",
        )


def check_processes(run: ResolvedRun, num_processes: int, where: str = "--num-processes") -> None:
    """Raise `ConfigError` where the transport, the strategy or the run's sizes do not allow several processes.

    `where`: source of the number, the flag or a launcher.
    """
    if num_processes < 1:
        raise ConfigError(f"needs at least 1 process, got {num_processes}", where=where)
    if num_processes == 1:
        return
    where = f"{where} {num_processes}"
    own = run.own_processes
    if own is not None:
        raise ConfigError(
            f"does not go with transport {run.transport.name}, which starts its own trainers",
            where=where,
            hint=f"--set transport.{own.option}={num_processes}",
        )
    if problem := too_many(run.strategy, num_processes):
        raise ConfigError(problem, where=where, hint=other_strategies(num_processes))
    train = run.run.train
    for key, count in (
        ("prompts_per_episode", train.prompts_per_episode),
        ("train_batch_size", train.train_batch_size),
    ):
        if num_processes // processes_per_rank(run) > count:
            raise ConfigError(
                f"more processes than train.{key} ({count}): some would never have work",
                where=where,
                hint=f"lower the number of processes, or --set train.{key}={num_processes}",
            )
