"""Functions of one's own in several processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

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
    for ref in discover("strategies").values():
        with suppress(PluginError):  # a broken one has no launcher
            if (found := load(ref.kind, ref.name).component.launch) is not None:
                break
    else:
        raise PluginError("no installed strategy starts processes", where="launch", hint="pip install rlhf-torch")
    resolve_name(found).launch(target, num_processes, **options)
