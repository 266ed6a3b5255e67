"""Options of strategies and transports, and the numbers of processes that they and a run's sizes allow."""

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
    """0 where the trainers make the rollouts."""
    option: str
    """The transport's option for the number of trainers."""


class StrategyConfig(Section):
    """Options every strategy has. The config of one subclasses this for capabilities that depend on its options."""

    def processes_per_rank(self) -> int:
        """Processes that compute the same rows together; their number divides that of all training processes."""
        return 1

    def layouts(self, num_processes: int) -> Iterator[dict[str, Any]]:
        """Values of these options that lay a model out over so many processes, those that communicate least first.

        `rlhf plan` takes the first that fits the memory at hand.
        """
        yield {}


class TransportConfig(Section):
    """Options every transport has; one with other capabilities than these overrides what core asks about them."""

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if self.updates_in_flight() and not run.engine.component.in_flight:
            problem = f"the engine {run.engine.name} takes new weights between two batches only"
            yield Problem("weights", problem, "say weights: between-batches, or take an engine made for it")
        own = self.own_processes()
        if own is not None and (found := too_many(run.strategy, own.trainers)):
            yield Problem(own.option, f"{found[0]}, not {own.trainers}; {found[1]}")

    def own_processes(self) -> OwnProcesses | None:
        """The processes it starts; None where it uses the existing ones (`--num-processes`, or a launcher's)."""
        return None

    def staleness_bound(self) -> int:
        """Most policy versions by which a sample may lag behind the trainer."""
        return 0

    def updates_in_flight(self) -> bool:
        """Whether new weights come while answers are sampled, which the engine has to be made for."""
        return False


def too_many(strategy: SelectedPlugin, num_processes: int) -> tuple[str, str] | None:
    """Why the strategy cannot train across `num_processes`, and a hint at those that can; None if it can."""

    def can(each: Component) -> bool:
        return each.max_processes is None or num_processes <= each.max_processes

    if can(strategy.component):
        return None
    most = strategy.component.max_processes
    told = f"strategy {strategy.name} is " + ("one process" if most == 1 else f"at most {most} processes")
    return told, strategies_with(can)


def can_hold(strategy: Component, optimizer: str) -> bool:
    """Whether the strategy can train with the optimizer of that name."""
    return strategy.optimizers is None or fold(optimizer) in map(fold, strategy.optimizers)


def strategies_with(ability: Callable[[Component], bool]) -> str:
    """Hint that names the installed strategies with an ability that this run needs."""
    found = []
    for ref in discover("strategies").values():
        with suppress(PluginError):  # a broken one is no way out
            if ability(load(ref.kind, ref.name).component):
                found.append(ref.name)
    return f"add --strategy {' or '.join(found)}" if found else "install a strategy that can"


def check_processes(run: ResolvedRun, num_processes: int, where: str = "--num-processes") -> None:
    """Raise `ConfigError` where the transport, the strategy or the run's sizes do not allow so many processes.

    `where`: source of the number, the flag or a launcher.
    """
    if num_processes < 1:
        raise ConfigError(f"needs at least 1 process, got {num_processes}", where=where)
    own, together = run.own_processes, run.strategy.typed(StrategyConfig).processes_per_rank()
    trainers = num_processes if own is None else own.trainers
    if trainers % together:
        start = f"--num-processes {together}" if own is None else f"--set transport.{own.option}={together}"
        raise ConfigError(
            f"{together} processes train the same rows together, and {trainers} do not form groups of {together}",
            where="strategy",
            hint=f"start a multiple of {together}: {start}",
        )
    if num_processes == 1:
        return
    where = f"{where} {num_processes}"
    if own is not None:
        raise ConfigError(
            f"does not go with transport {run.transport.name}, which starts its own trainers",
            where=where,
            hint=f"--set transport.{own.option}={num_processes}",
        )
    if found := too_many(run.strategy, num_processes):
        raise ConfigError(found[0], where=where, hint=found[1])
    for key in ("prompts_per_episode", "train_batch_size"):
        if num_processes // together > (count := getattr(run.run.train, key)):
            raise ConfigError(
                f"more processes than train.{key} ({count}): some would never have work",
                where=where,
                hint=f"lower the number of processes, or --set train.{key}={num_processes}",
            )
