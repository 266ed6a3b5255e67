"""How one reward is called: its spec, and the plugins that change it (the group `rlhf.reward_callers`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..config.sections import RewardCallOptions
from ..errors import PluginError
from ..plugins.discovery import import_target
from ..types import Rollout
from .values import Outcome

Call = Callable[[Sequence[Rollout], float], Awaitable[Sequence[Outcome]]]
"""Calls the reward within a number of seconds. Raises `RewardFault`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One reward of a run: its function, weight and call options."""

    name: str
    """Name in metrics and samples; unique in a run."""
    call_options: RewardCallOptions
    weight: float = 1.0
    function: Callable[..., Any] | None = None
    """The reward, options bound; None if it is called in processes of its own only, by `recipe`."""
    recipe: Callable[[], Callable[..., Any]] | None = None
    """Makes the reward there; picklable. None is a recipe of `function` itself."""
    plugin: str = "unknown plugin"
    """Distribution and version, shown in errors."""


class RewardCaller:
    """Changes how one reward is called: in another process, not at all for a known answer, or on the record.

    The entry points of the group `rlhf.reward_callers` name subclasses. The caller `isolate` is used for the rewards
    whose entry sets that option, a caller of any other name for every reward. Batches, concurrency, retries and
    `on_failure` stay with core.
    """

    def __init__(self, spec: RewardSpec) -> None:
        """Called once for each reward, before any sample is made."""

    async def call(self, rollouts: Sequence[Rollout], timeout_seconds: float, call: Call) -> Sequence[Outcome]:
        """Outcomes of one batch, by `call` or otherwise. Raises `RewardFault`. It must not block the event loop."""
        return await call(rollouts, timeout_seconds)

    def take_counts(self) -> Mapping[str, float]:
        """Numbers since the last call, added to `reward_calls/<reward>/<name>`."""
        return {}

    def close(self) -> None:
        """Release what it holds. Calls that still run fail."""


def open_callers(spec: RewardSpec) -> list[RewardCaller]:
    """The callers of a reward, outermost first. Raises `PluginError` if one is not installed or not usable."""
    callers: list[RewardCaller] = []
    with ExitStack() as opened:
        for ref in spec.call_options.callers():
            found = import_target(ref)
            if not (isinstance(found, type) and issubclass(found, RewardCaller)):
                raise PluginError(f"{ref.target} is not a subclass of RewardCaller", where=ref.label)
            callers.append(found(spec))
            opened.callback(callers[-1].close)
        opened.pop_all()
    return callers
