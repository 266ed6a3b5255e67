"""TensorBoard: event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf_core.components import HookContext

from .config import TensorBoardConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    """Writes event files into the folder of its options.

    The writer is created at the first update, so that after a resume it can drop later events of the earlier session.
    """

    def __init__(self, config: TensorBoardConfig, context: HookContext) -> None:
        self._folder = context.run_folder / config.folder
        self._writer: SummaryWriter | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
