"""`single`: one process, one device, no process group."""

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
    """Trains the model as it is, in this process. Raises `UserInputError` when that is one of several."""

    def __init__(self, config: SingleConfig, context: StrategyContext) -> None:
        env = read_launch_env()
        if env.world_size > 1:
            raise UserInputError(
                f"`single` trains in one process, but {env.world_size} were started",
                where="strategy.name",
                hint="use `--strategy ddp` (or fsdp, gemini, low-level-zero), or start one process",
            )
        super().__init__(config, context)

    def setup(self) -> None:
        """Do nothing: there is no process group."""

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """No gradient leaves this process, so that the largest may be summed where they arise."""
        from rlhf_passes import direct_gradients

        return direct_gradients(model)
