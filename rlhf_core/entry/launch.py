"""Functions of one's own in several processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from ..components import Component
from ..errors import PluginError
from ..plugins.discovery import discover, load


def launch(target: str | Callable[..., Any], num_processes: int, **options: Any) -> None:
    """Call a function as each of `num_processes` ranks on this machine, and wait until all of them return.

    The launcher is that of `rlhf train --num-processes`, which an installed strategy names (`Component.launch`).

    Args:
        target: `module:attr`, or a function of a module. The ranks import it, with the `sys.path` of this process.
        num_processes: number of ranks.
        options: of the launcher; that of our strategies takes `arguments` (JSON values), `timeout_seconds` and
            `stops_by_itself` (see `rlhf_strategies.launch`).

    Raises:
        RlhfError: what the first failed rank raised, with the rank in `where`.
        UserInputError: the target has no name to import it by, or there is no process to start.
        PluginError: no installed strategy names a launcher.
        KeyboardInterrupt: the ranks were stopped by a signal.

    Example:
        launch("my_module:train_shard", 2, arguments=["data.jsonl"])
    """
    launcher().launch(target, num_processes, **options)


def launcher(strategy: Component | None = None) -> Any:
    """The module that starts processes: that of the strategy, or else of any installed one (see `Component.launch`).

    Raises `PluginError` if there is none.
    """
    found = None if strategy is None else strategy.launch
    for ref in discover("strategies").values() if found is None else ():
        with suppress(PluginError):  # a broken one has no launcher
            found = found or load(ref.kind, ref.name).component.launch
    if found is None:
        raise PluginError("no installed strategy starts processes", where="launch", hint="pip install rlhf-torch")
    return import_module(found)
