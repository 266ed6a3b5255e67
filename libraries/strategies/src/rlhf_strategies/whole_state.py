"""The state of a trained model as full tensors by name, in memory: for programs that replace it between steps.

`save_model`, `save_optimizer` and their counterparts do the same with files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_core.strategy import TrainedModel

from .base import StrategyBase

_GATHERED_BYTES = 64 * 1024**2


def whole_weights(strategy: StrategyBase, trained: TrainedModel, names: Collection[str]) -> dict[str, Tensor]:
    """Return full weights on the CPU, fp32 if the strategy keeps master weights. Collective.

    Args:
        strategy: the strategy that prepared the model.
        trained: the model.
        names: names of the parameters.
    """
    shards = strategy.state_dict_shards(trained.model, _GATHERED_BYTES, lambda name: name in names)
    return {name: tensor.detach().cpu() for shard in shards for name, tensor in shard.items()}


def whole_optimizer_state(strategy: StrategyBase, trained: TrainedModel) -> dict[str, dict[str, Any]]:
    """Return the full optimizer state of each parameter that has any, on the CPU. Collective.

    Args:
        strategy: the strategy that prepared the model.
        trained: the model.
    """
    prepared = strategy.prepared_of(trained.optimizer)
    return {
        name: {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in strategy._optimizer_entries(prepared)
    }


def put_state(
    strategy: StrategyBase,
    trained: TrainedModel,
    weights: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Replace weights and all of the optimizer's state, and discard the gradients. Collective.

    Args:
        strategy: the strategy that prepared the model.
        trained: the model.
        weights: full weights by the names of the parameters, equal on all ranks. Others stay.
        optimizer_state: full state by the names of the parameters, equal on all ranks. The state of others is dropped.
    """
    prepared = strategy.prepared_of(trained.optimizer)
    strategy.drop_gradients(trained)
    with torch.no_grad():
        for name, value in weights.items():
            strategy._put(prepared, name, prepared.parameters[name], value.to(strategy.device))
        strategy._forget_moments(prepared)
        for name, values in optimizer_state.items():
            strategy._put_optimizer_entry(prepared, name, dict(values))
