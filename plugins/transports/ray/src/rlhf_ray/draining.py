"""The hook plugin `ray-draining`: a checkpoint of each episode while the node of a trainer is being drained.

The driver sees which nodes are drained, and the first trainer decides about the run. The request is a file in the run
folder.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_core import Component, Section, hookimpl
from rlhf_core.components import HookContext
from rlhf_core.hookspecs import Action, Moment
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import is_own

_REQUEST = "ray-checkpoint"


def _request(run_folder: Path) -> Path:
    return RunFolder(run_folder).control / _REQUEST


def request_checkpoint(run_folder: Path) -> None:
    """Have the run write a checkpoint at the end of this episode. Raises `OSError`."""
    path = _request(run_folder)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def take_request(run_folder: Path) -> bool:
    """Whether a checkpoint was requested since the last call. Anything but a regular file of this user is ignored."""
    path = _request(run_folder)
    if path.parent.is_symlink() or not is_own(path):
        return False
    path.unlink(missing_ok=True)
    return True


class Draining:
    """Decides for a checkpoint if the driver has requested one."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        take_request(run_folder)  # of an earlier session

    @hookimpl
    def rlhf_decide(self, moment: Moment) -> list[Action]:
        if moment.at != "update" or not take_request(self._folder):
            return []
        return [Action(kind="checkpoint", by="ray-draining", reason="the node of a trainer is being drained")]


def build(config: Section, context: HookContext) -> Draining:
    """The hook plugin."""
    return Draining(context.run_folder)


draining = Component(
    summary="Writes a checkpoint of each episode while a trainer's node is being drained.",
    config=Section,
    build="rlhf_ray.draining:build",
    always_on=True,
)
