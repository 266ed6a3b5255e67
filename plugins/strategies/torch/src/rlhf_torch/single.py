"""`single`: one process and one device, without a process group."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rlhf_core.components import StrategyContext
from rlhf_core.distributed import read_launch_env
from rlhf_core.errors import UserInputError
from rlhf_strategies import StrategyBase

from .config import SingleConfig

if TYPE_CHECKING:
    from torch import nn


class SingleStrategy(StrategyBase):
    """Trains the unmodified model in this process. Raises `UserInputError` if it is one of several processes."""

    def __init__(self, config: SingleConfig, context: StrategyContext) -> None:
        env = read_launch_env()
        if env.world_size > 1:
            raise UserInputError(
                f"`single` trains in one process, but {env.world_size} were started",
                where="strategy.name",
                hint="use `--strategy torch-ddp` (or fsdp, gemini, low-level-zero), or start one process",
            )
        super().__init__(config, context)

    def setup(self) -> None:
        """Do nothing, since there is no process group."""

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Accumulate vocabulary gradients in place, which is possible since gradients stay in this process."""
        from rlhf_passes import direct_gradients

        return direct_gradients(model)
