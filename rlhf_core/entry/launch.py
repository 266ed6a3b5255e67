"""Functions of one's own in several processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from ..errors import PluginError
from ..plugins.discovery import discover
from ..plugins.selected import load


def launch(
    target: str | Callable[..., Any],
    num_processes: int,
    *,
    arguments: Sequence[Any] = (),
    timeout_seconds: float = 600.0,
    stops_by_itself: bool = False,
) -> None:
    """Call a function as each of `num_processes` ranks on this machine, and wait until all of them return.

    The launcher is that of `rlhf train --num-processes`, which an installed strategy names (`Component.launch`).

    Args:
        target: `module:attr`, or a function of a module. The ranks import it, with the `sys.path` of this process.
        num_processes: number of ranks.
        arguments: positional arguments, which are JSON values; every rank gets the same.
        timeout_seconds: the longest that one rank waits for another. After the first rank has ended, the others are
            killed when this has passed.
        stops_by_itself: whether the target ends soon after the first Ctrl-C, which it reads from an `InterruptFlag`.
            Otherwise that stops the ranks at once. Call from the main thread: signals are handled meanwhile.

    Raises:
        RlhfError: what the first failed rank raised, with the rank in `where`.
        UserInputError: the target has no name to import it by, or there is no process to start.
        PluginError: no installed strategy names a launcher.
        KeyboardInterrupt: the ranks were stopped by a signal.

    Example:
        launch("my_module:train_shard", 2, arguments=["data.jsonl"])
    """
    launcher().launch(
        target, num_processes, arguments=arguments, timeout_seconds=timeout_seconds, stops_by_itself=stops_by_itself
    )


def launcher(module: str | None = None) -> Any:
    """The module that starts processes (see `Component.launch`); None: that of any installed strategy.

    Raises `PluginError` if there is none.
    """
    for ref in discover("strategies").values() if module is None else ():
        with suppress(PluginError):  # a broken one has no launcher
            module = module or load(ref.kind, ref.name).component.launch
    if module is None:
        raise PluginError("no installed strategy starts processes", where="launch", hint="pip install rlhf-torch")
    return import_module(module)
