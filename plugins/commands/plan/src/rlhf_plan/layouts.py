"""The smallest layout of a run's training processes that fits the memory of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.config import ResolvedRun, StrategyConfig
from rlhf_core.errors import UserInputError

from .memory import ProcessPlan

_COUNTS = (*range(1, 9), 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Training processes that are tried: some of one machine, then machines of eight."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of training processes, and how they share the model."""

    memory_bytes: int
    """Of one process, as asked."""
    fits: bool
    """False: no layout of the strategy fits; this one needs least."""
    num_processes: int
    """Training processes."""
    options: dict[str, Any]
    """The strategy's, where they differ from the run file's."""
    processes: Sequence[ProcessPlan]

    @property
    def largest(self) -> ProcessPlan:
        """The process that needs most."""
        return max(self.processes, key=lambda each: each.total_bytes)


def smallest_layout(
    resolved: ResolvedRun, memory_bytes: int, processes_of: Callable[[ResolvedRun, int], Sequence[ProcessPlan]]
) -> Layout:
    """The layout of fewest processes that fits, of these the one that communicates least; else the leanest there is.

    processes_of: what each process needs, of a run and a number of training processes. Raises `UserInputError` for a
    layout that the model does not allow; where it allows none, so does this.
    """
    leanest: Layout | None = None
    refusal: UserInputError | None = None
    for count, options, changed in _layouts(resolved):
        try:
            found = Layout(memory_bytes, True, count, options, processes_of(changed, count))
        except UserInputError as error:
            refusal = error
            continue
        if found.largest.total_bytes <= memory_bytes:
            return found
        if leanest is None or found.largest.total_bytes < leanest.largest.total_bytes:
            leanest = replace(found, fits=False)
    if leanest is None:
        assert refusal is not None  # one process is always tried
        raise refusal
    return leanest


def _layouts(resolved: ResolvedRun) -> Iterator[tuple[int, dict[str, Any], ResolvedRun]]:
    """Each number of processes that the run allows, with each layout of the strategy's options."""
    config, most = resolved.strategy.typed(StrategyConfig), resolved.strategy.component.max_processes
    most_ranks = min(resolved.run.train.prompts_per_episode, resolved.run.train.train_batch_size)
    for count in _COUNTS:
        if most is not None and count > most:
            return
        for options in config.layouts(count):
            values = config.model_dump(exclude_unset=True)
            different = {key: value for key, value in options.items() if getattr(config, key) != value}
            made = type(config).model_validate({**values, **different})
            changed = replace(resolved, strategy=replace(resolved.strategy, config=made))
            if count // made.processes_per_rank() <= most_ranks:
                yield count, different, changed
