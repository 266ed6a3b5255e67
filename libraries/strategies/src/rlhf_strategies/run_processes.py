"""Runs in several processes on this machine (`--num-processes N`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rlhf_core.config.resolve import ResolvedRun
from rlhf_core.distributed.launch_env import read_launch_env
from rlhf_core.entry.ledger import RunLedger
from rlhf_core.entry.train import prepare, run_rank
from rlhf_core.runfolder.folder import RunFolder

from .launching import launch

_TIMEOUT_SECONDS = 600.0
"""How long processes wait for each other if the strategy lacks the option `timeout_seconds`."""


def run_in_processes(
    resolved: ResolvedRun, output: Path, checkpoint: Path | None, num_processes: int, hooks: Sequence[str]
) -> None:
    """Run in `num_processes` processes on this machine, and wait for all of them. Raises as `launch` does.

    This process owns the run folder `output` throughout. Rank 0 writes into it, and ends with this process.

    `hooks`: hook factories as `module:attr`, called in rank 0.
    """
    request = {
        "run": resolved.to_mapping(),
        "output": str(output),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "hooks": list(hooks),
    }
    timeout_seconds = float(getattr(resolved.strategy.config, "timeout_seconds", _TIMEOUT_SECONDS))
    launch(run_request, num_processes, arguments=[request], timeout_seconds=timeout_seconds, stops_by_itself=True)


def run_request(request: Mapping[str, Any]) -> None:
    """Run this process's rank in the run folder that the launcher owns."""
    rank = read_launch_env().rank
    prepared = prepare(request["run"], hooks=request["hooks"] if rank == 0 else ())
    folder = RunFolder(Path(request["output"]))
    checkpoint = None if request["checkpoint"] is None else Path(request["checkpoint"])
    with folder.logging() if rank == 0 else nullcontext():
        run_rank(prepared, RunLedger(folder), checkpoint)
