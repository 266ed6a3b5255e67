"""Starts the ranks of the service: on this machine, or by a transport that can start ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

from rlhf_core.errors import UserInputError
from rlhf_strategies import launch

from .options import plugin_of

Launch = Callable[[str, int, Sequence[Any]], None]
"""Calls `module:attr` as each of some ranks with arguments (JSON values), and waits until all return."""
LOCAL = "local"


@runtime_checkable
class LaunchingTransport(Protocol):
    """A transport that can start single ranks, besides whole runs."""

    def launch(self, target: str, num_processes: int, *, arguments: Sequence[Any] = ()) -> None:
        """Call a function as each rank, as `rlhf_strategies.launch` does, wherever the transport runs processes.

        Args:
            target: the function, as `module:attr`.
            num_processes: number of ranks. Rank 0 runs on the machine of the caller.
            arguments: its arguments, the same for every rank.
        """


def launcher_of(transport: str, options: Mapping[str, Any]) -> Launch:
    """Return what starts the ranks.

    Args:
        transport: name of an installed transport.
        options: its options.

    Raises:
        UserInputError: the transport cannot start ranks, or an option is not valid.
    """
    if transport == LOCAL:
        if options:
            raise UserInputError(
                f"the transport local does not have the option {', '.join(sorted(options))}",
                where="--set transport",
                hint="add --transport ray",
            )
        return _launch_here
    selected, config = plugin_of("transports", "transport", transport, options)
    built = selected.build(config, None)
    if not isinstance(built, LaunchingTransport):
        raise UserInputError(
            f"the transport {transport!r} starts runs, but not the ranks of a service",
            where="--transport",
            hint="leave it out, or use ray",
        )
    return lambda target, num_processes, arguments: built.launch(target, num_processes, arguments=arguments)


def _launch_here(target: str, num_processes: int, arguments: Sequence[Any]) -> None:
    """Run alone in this process, or start several on this machine."""
    if num_processes == 1:
        resolve_name(target)(*arguments)
    else:
        launch(target, num_processes, arguments=arguments, stops_by_itself=True)
