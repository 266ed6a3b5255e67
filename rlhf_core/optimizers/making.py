"""Makes the optimizer and the schedule of one trained model with the plugins that a run names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..components import OptimizerContext, ScheduleContext
from ..config.resolved import Configured, ResolvedRun
from ..config.sections import OptimizerConfig
from ..errors import PluginError
from ..strategy import Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


def make_optimizer(resolved: ResolvedRun, role: str, model: nn.Module, strategy: Strategy) -> Optimizer:
    """The optimizer of the trained parameters of `model`, before a strategy wraps it.

    Raises `PluginError` if it leaves parameters out or already has state: a strategy may still replace parameters.
    """
    selected = resolved.optimizer
    options = selected.typed(OptimizerConfig)
    lr = options.critic_lr if role == "critic" and options.critic_lr is not None else options.lr
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    context = OptimizerContext(parameters=parameters, lr=lr, strategy=strategy)
    optimizer: Optimizer = selected.build(selected.config, context)
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    problem = None
    if held != {id(each) for each in parameters.values()}:
        problem = "does not hold exactly the parameters that it was given"
    elif any(optimizer.state.values()):
        problem = "has state before its first step, which is lost if the strategy shards or moves the parameters"
    if problem is not None:
        raise PluginError(f"its optimizer {problem}", where=selected.label, hint="tell the plugin's authors")
    return optimizer


def make_scheduler(optimizer: Optimizer, schedule: Configured, *, warmup_updates: int, total_updates: int) -> LambdaLR:
    """A scheduler that is stepped once per update: linear warm-up from above 0, then the factors of `schedule`."""
    from torch.optim.lr_scheduler import LambdaLR

    context = ScheduleContext(warmup_updates=warmup_updates, total_updates=total_updates)
    after_warmup: Any = schedule.build(schedule.config, context)

    def factor(update: int) -> float:
        if update < warmup_updates:
            return (update + 1) / warmup_updates
        value = float(after_warmup(update))
        if not (math.isfinite(value) and value >= 0):
            raise PluginError(f"its factor for update {update} is {value}", where=schedule.label)
        return value

    return LambdaLR(optimizer, factor)
