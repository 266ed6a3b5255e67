"""The components of this distribution."""

from __future__ import annotations

from rlhf_core import Component

from .config import TensorBoardConfig, WandbConfig

tensorboard = Component(
    summary="TensorBoard event files in the run folder.",
    config=TensorBoardConfig,
    build="rlhf_loggers.tensorboard:TensorBoardLogger",
    requires=("tensorboard",),
    install="pip install 'rlhf-loggers[tensorboard]', or set logging.tensorboard to false",
)

wandb = Component(
    summary="A Weights & Biases run.",
    config=WandbConfig,
    build="rlhf_loggers.wandb:WandbLogger",
    requires=("wandb",),
    install="pip install 'rlhf-loggers[wandb]'",
)
