"""The spec of a reward, and the plugins that change how it is called (the group `rlhf.reward_callers`)."""

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
"""Calls the reward with a deadline in seconds. Raises `RewardFault`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One reward of a run: its function, weight and call options."""

    name: str
    """Unique name in metrics and samples."""
    call_options: RewardCallOptions
    """Options of calls: batches, concurrency, deadline, retries, failure policy."""
    weight: float = 1.0
    """Factor of the reward in the combined score."""
    function: Callable[..., Any] | None = None
    """The reward with bound options. None if it only runs in separate processes, which build it by `recipe`."""
    recipe: Callable[[], Callable[..., Any]] | None = None
    """Picklable function that builds the reward in another process. None sends `function` itself."""
    plugin: str = "unknown plugin"
    """Distribution and version, shown in errors."""


class RewardCaller:
    """Changes how one reward is called, for example in another process, from a cache, or with a record of all calls.

    Entry points of the group `rlhf.reward_callers` are subclasses. The caller `isolate` wraps the rewards whose entry
    sets that option, and a caller with any other name wraps every reward. Core keeps control of batches, concurrency,
    retries and `on_failure`. Each process that samples answers creates one caller per reward, and awaits `call` on the
    event loop of its rewards, several calls at a time.

    Example:
        caller = Caller(spec)  # on each sampling rank, once per reward
        for batch in batches_of(finished_rollouts):
            outcomes = await caller.call(batch, spec.call_options.timeout_seconds, call=next_caller_or_reward)
        metrics = caller.take_counts()
        caller.close()
    """

    def __init__(self, spec: RewardSpec) -> None:
        """Prepare for calls. Called once per reward and process, before the first sample.

        Args:
            spec: The reward.
        """

    async def call(self, rollouts: Sequence[Rollout], timeout_seconds: float, call: Call) -> Sequence[Outcome]:
        """Return one outcome per rollout, from `call` or another source. Must not block the event loop.

        Args:
            rollouts: One batch.
            timeout_seconds: Deadline of the call.
            call: The next caller, or the reward itself.

        Raises:
            RewardFault: The whole call failed. Core retries it as often as the option `retries` allows.
        """
        return await call(rollouts, timeout_seconds)

    def take_counts(self) -> Mapping[str, float]:
        """Return counts since the last call, which are added to `reward_calls/<reward>/<name>`."""
        return {}

    def close(self) -> None:
        """Release resources. Calls that are still running fail."""


def open_callers(spec: RewardSpec) -> list[RewardCaller]:
    """Create the callers of a reward, outermost first. Raises `PluginError` if one is not installed or invalid."""
    callers: list[RewardCaller] = []
    with ExitStack() as opened:
        for ref in spec.call_options.callers():
            target = import_target(ref)
            if not (isinstance(target, type) and issubclass(target, RewardCaller)):
                raise PluginError(f"{ref.target} is not a subclass of RewardCaller", where=ref.label)
            callers.append(target(spec))
            opened.callback(callers[-1].close)
        opened.pop_all()
    return callers
