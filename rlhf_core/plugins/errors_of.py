"""Names the plugin in errors that its code raises during a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import RlhfError
from ..util.error_text import error_text

_LOST_MARKS = ("connection closed", "timed out", "timeout", "connection reset", "broken pipe", "recv", "socket")


@contextmanager
def errors_of(
    plugin: str | None, call: str, *, caller: str = "rlhf_core", kind: type[RlhfError] = RlhfError
) -> Iterator[None]:
    """Name the plugin, and the line of its code, in errors that its `call` raises.

    An `RlhfError` keeps its type. A lost process and an out-of-memory error pass unchanged, as the plugin does not
    cause them.

    Args:
        plugin: its label, such as `algorithm "ppo" (rlhf-ppo 0.1.0)`. None (an object built by hand) changes nothing.
        call: the function of the plugin that is called.
        caller: see `error_text`.
        kind: type of the error that replaces any other than an `RlhfError`.
    """
    if plugin is None:
        yield
        return
    try:
        yield
    except RlhfError as error:
        error.raised_by(plugin)
        raise
    except Exception as error:  # a third-party plugin may raise anything
        if isinstance(error, RuntimeError) and (is_lost_peer(error) or is_out_of_memory(error)):
            raise
        log = " (the traceback is in the run's log)" if kind.exit_code == 1 else ""
        hint = f"if its options are right, the plugin is broken: report it to its authors{log}"
        raise kind(f"{call} raised {error_text(error, caller=caller)}", where=plugin, hint=hint) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the host ran out of memory."""
    import torch

    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text or "out of memory" in text


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective operation failed because another process was lost."""
    import torch.distributed as dist

    text = str(error).lower()
    if isinstance(error, dist.DistError):
        return True
    return any(mark in text for mark in _LOST_MARKS) and ("gloo" in text or "nccl" in text or "store" in text)
