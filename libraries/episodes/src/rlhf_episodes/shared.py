"""Environments whose episodes share resources, such as a model, in each process that plays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rlhf_core.plugins.selected import SelectedPlugin, load
from rlhf_core.plugins.trust import is_file_reference

from .leases import OF_PROCESS

BuildT = TypeVar("BuildT", bound=Callable[..., Any])
_MARK = "shares_resources"


class SharedEnvironments(Protocol):
    """The result of a `build` that is marked by `shares_resources`. Its methods are called on several threads.

    Players of a process with the same options and seed share one, for training and for each set of an evaluation.

    Example:
        shared = build(config, context)  # before the first episode of any player
        for task in tasks:
            outcome = await play(shared.new_episode(), task)
        shared.close()  # with the last of the players
    """

    def new_episode(self) -> Any:
        """Return the environment of one episode, in any supported form."""

    def close(self) -> None:
        """Release the resources. No episode is open."""


def shares_resources(build: BuildT) -> BuildT:
    """Mark the `build` of an environment that returns `SharedEnvironments` instead of one episode's environment.

    It is then called once for all players of a process, before the first episode and without a deadline.

    Args:
        build: Function of options and context.

    Returns:
        The function itself.
    """
    setattr(build, _MARK, True)
    return build


def is_shared(environment: SelectedPlugin | str) -> bool:
    """Whether the `build` of an environment is marked by `shares_resources`. False for classes without a `build`.

    Args:
        environment: The environment, or its name, which may be `FILE.py:NAME`.
    """
    if isinstance(environment, str):
        if is_file_reference(environment):
            return False
        environment = load("environments", environment)
    return environment.function is None and hasattr(environment.import_build(), _MARK)


class EnvironmentMaker:
    """Builds environments of episodes, each by itself or from shared resources."""

    def __init__(self, build: Callable[[], Any], *, shared: bool, key: str) -> None:
        """Build nothing yet.

        Args:
            build: Builds an environment or, if `shared`, `SharedEnvironments`.
            shared: Whether episodes share resources (`is_shared`).
            key: Makers of a process with equal keys share the resources.
        """
        self._build = build
        self._is_shared = shared
        self._key = key
        self._resources: SharedEnvironments | None = None

    def open(self) -> None:
        """Build the shared resources, if there are any. Called before episodes start."""
        if self._is_shared and self._resources is None:
            self._resources = OF_PROCESS.acquire(self._key, self._build)

    def __call__(self) -> Any:
        """Build the environment of one episode."""
        return self._build() if self._resources is None else self._resources.new_episode()

    def close(self) -> None:
        """Release the shared resources. The last maker closes them."""
        resources, self._resources = self._resources, None
        if resources is not None:
            OF_PROCESS.release(self._key)
