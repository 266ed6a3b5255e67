"""`single`: one process, one device, no process group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlhf_core.components import StrategyContext
from rlhf_core.errors import UserInputError
from rlhf_core.launch_env import read_launch_env
from rlhf_core.strategy import Trained
from rlhf_core.strategy_base import StrategyBase
from rlhf_core.strategy_parts import make_adamw, resolve_device, resolve_precision, torch_step

from .config import SingleConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class SingleStrategy(StrategyBase):
    """Trains the model as it is, in this process."""

    def setup(self) -> None:
        """Nothing to join."""

    def make_optimizer(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        return make_adamw(params, lr, betas, eps, weight_decay)

    def _wrap(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None
    ) -> Trained:
        return Trained(model.to(self.device), optimizer, scheduler)

    def step(self, trained: Trained) -> float:
        prepared = self.prepared_of(trained.optimizer)
        return torch_step(trained.optimizer, trained.scheduler, prepared.max_grad_norm, prepared.loss_scale)


def build(config: SingleConfig, context: StrategyContext) -> SingleStrategy:
    """Make the strategy. Raises `UserInputError` when this process is one of several."""
    env = read_launch_env()
    if env.world_size > 1:
        raise UserInputError(
            f"`single` trains in one process, but {env.launcher} started {env.world_size}",
            where="strategy.name",
            hint="use `--strategy ddp` (or fsdp, gemini, low-level-zero), or start one process",
        )
    device = resolve_device(context.device)
    precision = resolve_precision(config.precision, device, on_cpu="fp32")
    return SingleStrategy(device=device, precision=precision, timeout_seconds=600.0)
