"""Options of strategies and transports, and the numbers of processes that a run allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..components import Component
from ..errors import ConfigError, PluginError
from ..plugins.discovery import discover
from ..plugins.selected import SelectedPlugin, load
from ..util.did_you_mean import fold
from .problems import Problem
from .section import Section

if TYPE_CHECKING:
    from .resolved import ResolvedRun


@dataclass(frozen=True, slots=True)
class OwnProcesses:
    """The processes that a transport starts itself."""

    trainers: int
    makers: int
    """0 if the trainers generate the rollouts."""
    option: str
    """The transport's option for the number of trainers."""


class StrategyConfig(Section):
    """Options of every strategy. A strategy's config subclasses this if its capabilities depend on its options."""

    def processes_per_rank(self) -> int:
        """Return the number of processes that compute the same rows together, a divisor of all training processes."""
        return 1

    def layouts(self, num_processes: int) -> Iterator[dict[str, Any]]:
        """Yield values of these options that divide a model over `num_processes`, least communication first.

        `rlhf plan` takes the first layout that fits the available memory.
        """
        yield {}


class TransportConfig(Section):
    """Options of every transport. A transport's config overrides the methods for which it differs."""

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if self.updates_in_flight() and not run.engine.component.in_flight:
            problem = f"the engine {run.engine.name} accepts new weights only between two batches"
            yield Problem("weights", problem, "set weights: between-batches, or use another engine")
        started = self.own_processes()
        if started is not None and (limit := find_process_limit(run.strategy, started.trainers)):
            yield Problem(started.option, f"{limit[0]}, not {started.trainers}", limit[1])

    def own_processes(self) -> OwnProcesses | None:
        """Return the processes it starts, or None if it uses existing ones (`--num-processes`, or a launcher's)."""
        return None

    def staleness_bound(self) -> int:
        """Return the maximum number of policy versions by which a sample may be older than the trainer's policy."""
        return 0

    def updates_in_flight(self) -> bool:
        """Whether new weights arrive while answers are sampled, which the engine must support."""
        return False


def find_process_limit(strategy: SelectedPlugin, num_processes: int) -> tuple[str, str] | None:
    """Return why the strategy cannot train on `num_processes`, and a hint that names others, or None if it can."""

    def can(each: Component) -> bool:
        return each.max_processes is None or num_processes <= each.max_processes

    if can(strategy.component):
        return None
    limit = strategy.component.max_processes
    message = f"strategy {strategy.name} supports " + ("one process" if limit == 1 else f"at most {limit} processes")
    return message, strategies_with(can)


def can_hold(strategy: Component, optimizer: str) -> bool:
    """Whether the strategy can train with the optimizer of that name."""
    return strategy.optimizers is None or fold(optimizer) in map(fold, strategy.optimizers)


def strategies_with(ability: Callable[[Component], bool]) -> str:
    """Return a hint that names the installed strategies with an ability that this run needs."""
    names = []
    for ref in discover("strategies").values():
        with suppress(PluginError):  # a broken one does not help
            if ability(load(ref.kind, ref.name).component):
                names.append(ref.name)
    return f"add --strategy {' or '.join(names)}" if names else "install a strategy that can"


def check_processes(run: ResolvedRun, num_processes: int, where: str = "--num-processes") -> None:
    """Raise `ConfigError` if the transport, the strategy or the run's sizes do not allow `num_processes`.

    `where`: source of the number, the flag or a launcher.
    """
    if num_processes < 1:
        raise ConfigError(f"needs at least 1 process, got {num_processes}", where=where)
    started, together = run.own_processes, run.strategy.typed(StrategyConfig).processes_per_rank()
    trainers = num_processes if started is None else started.trainers
    if trainers % together:
        start = f"--num-processes {together}" if started is None else f"--set transport.{started.option}={together}"
        raise ConfigError(
            f"{together} processes train the same rows together, and {trainers} do not form groups of {together}",
            where="strategy",
            hint=f"start a multiple of {together}: {start}",
        )
    if num_processes == 1:
        return
    where = f"{where} {num_processes}"
    if started is not None:
        raise ConfigError(
            f"cannot be combined with transport {run.transport.name}, which starts its own trainers",
            where=where,
            hint=f"--set transport.{started.option}={num_processes}",
        )
    if problem := find_process_limit(run.strategy, num_processes):
        raise ConfigError(problem[0], where=where, hint=problem[1])
    for key in ("prompts_per_episode", "train_batch_size"):
        if num_processes // together > (count := getattr(run.run.train, key)):
            raise ConfigError(
                f"more processes than train.{key} ({count}): some would never get work",
                where=where,
                hint=f"lower the number of processes, or --set train.{key}={num_processes}",
            )
