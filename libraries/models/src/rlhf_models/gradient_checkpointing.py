"""Gradient checkpointing of transformers models, whose method for it was renamed in transformers 5.23."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Compute a model's activations again in the backward pass, instead of storing them.

    Args:
        model: transformers model, changed in place.

    Raises:
        ValueError: the model does not support it.
    """
    renamed = getattr(model, "activation_checkpointing_enable", None)
    (model.gradient_checkpointing_enable if renamed is None else renamed)({"use_reentrant": False})
