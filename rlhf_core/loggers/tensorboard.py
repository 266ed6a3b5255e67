"""TensorBoard: every number of every line of `metrics.jsonl`, under the same names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserInputError
from ..hookspecs import Metrics, hookimpl
from .scalars import scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    """Writes event files into `folder`, or into `tensorboard/` of the run folder.

    The writer is created at the first line, so that after a resume it can drop events later than the checkpoint.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Raises `UserInputError` where the package `tensorboard` is not installed."""
        if find_spec("tensorboard") is None:
            raise UserInputError(
                "tensorboard is not installed",
                where="logging.tensorboard",
                hint="pip install 'rlhf-core[tensorboard]', or set logging.tensorboard to false",
            )
        self._folder = folder
        self._writer: SummaryWriter | None = None

    @hookimpl
    def rlhf_run_start(self, run_folder: Path) -> None:
        self._folder = self._folder or run_folder / "tensorboard"

    @hookimpl
    def rlhf_metrics(self, line: Metrics) -> None:
        step = int(line["step"])
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, step)

    @hookimpl
    def rlhf_episode_end(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    @hookimpl
    def rlhf_fit_end(self) -> None:
        """Close the file; a line that comes later opens another."""
        self.close()

    @hookimpl
    def rlhf_run_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Write what is queued and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, first_step: int) -> SummaryWriter:
        if self._folder is None:
            raise UserInputError("no folder to write to", where="TensorBoardLogger", hint="give it one: folder=…")
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=first_step)
