"""Finds the smallest layout of a run's training processes that fits the memory of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.config import ResolvedRun, StrategyConfig
from rlhf_core.errors import UserInputError

from .memory import ProcessPlan

_COUNTS = (*range(1, 9), 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of training processes to try: those of one machine, then multiples of machines with eight."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A number of training processes, and strategy options that divide the model over them."""

    memory_bytes: int
    """Available memory of one process."""
    fits: bool
    """False if no layout of the strategy fits. This one then needs the least memory."""
    num_processes: int
    """Number of training processes."""
    options: dict[str, Any]
    """Options of the strategy that differ from the run file."""
    processes: Sequence[ProcessPlan]

    @property
    def largest(self) -> ProcessPlan:
        """The process that needs the most memory."""
        return max(self.processes, key=lambda each: each.total_bytes)


def smallest_layout(
    resolved: ResolvedRun, memory_bytes: int, processes_of: Callable[[ResolvedRun, int], Sequence[ProcessPlan]]
) -> Layout:
    """Return the layout with the fewest processes that fits, among these the one with the least communication.

    If no layout fits, the one with the smallest largest process is returned.

    Args:
        resolved: the run.
        memory_bytes: available memory of one process.
        processes_of: estimates each process of a run with a number of training processes. Raises `UserInputError` for
            a layout that the model does not allow.

    Raises:
        UserInputError: if the model does not allow any layout.
    """
    smallest: Layout | None = None
    refusal: UserInputError | None = None
    for count, options, changed in _layouts(resolved):
        try:
            layout = Layout(memory_bytes, True, count, options, processes_of(changed, count))
        except UserInputError as error:
            refusal = error
            continue
        if layout.largest.total_bytes <= memory_bytes:
            return layout
        if smallest is None or layout.largest.total_bytes < smallest.largest.total_bytes:
            smallest = replace(layout, fits=False)
    if smallest is None:
        assert refusal is not None  # one process is always tried
        raise refusal
    return smallest


def _layouts(resolved: ResolvedRun) -> Iterator[tuple[int, dict[str, Any], ResolvedRun]]:
    """Yield each allowed number of processes with each layout of the strategy's options."""
    config, max_processes = resolved.strategy.typed(StrategyConfig), resolved.strategy.component.max_processes
    max_ranks = min(resolved.run.train.prompts_per_episode, resolved.run.train.train_batch_size)
    for count in _COUNTS:
        if max_processes is not None and count > max_processes:
            return
        for options in config.layouts(count):
            values = config.model_dump(exclude_unset=True)
            different = {key: value for key, value in options.items() if getattr(config, key) != value}
            new_config = type(config).model_validate({**values, **different})
            changed = replace(resolved, strategy=replace(resolved.strategy, config=new_config))
            if count // new_config.processes_per_rank() <= max_ranks:
                yield count, different, changed
