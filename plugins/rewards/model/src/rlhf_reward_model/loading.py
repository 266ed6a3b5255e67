"""A reward model and its tokenizer from a folder or the hub, checked before it scores anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_core.place import resolve_device
from rlhf_models import from_files, load_tokenizer

WHERE = 'reward "model"'


def place(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the model. Raises `UserInputError` where there is no such device."""
    try:
        chosen = resolve_device(device)
    except UserInputError as error:
        raise UserInputError(error.message, where=f"{WHERE}: device", hint="say device: cpu in its entry") from None
    if dtype == "auto":
        return chosen, torch.float32 if chosen.type == "cpu" else torch.bfloat16
    return chosen, getattr(torch, dtype)


def load(
    path: str, dtype: torch.dtype, label_index: int | None
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, int]:
    """The tokenizer, the model, in evaluation mode on the CPU, and the label that is the score.

    Raises `UserInputError`: one cannot be loaded, has no trained head, or several labels and none was chosen.
    """
    config = ModelConfig(path=str(Path(path).expanduser()))
    hint = None
    try:
        tokenizer = load_tokenizer(config)
        hint = "it needs a trained head: rlhf train --algorithm reward-model makes one"
        model = from_files(config, dtype, "AutoModelForSequenceClassification")
    except UserInputError as error:
        raise UserInputError(error.message, where=WHERE, hint=hint or error.hint) from error
    return tokenizer, model.eval().requires_grad_(False), _label(model, path, label_index)


def _label(model: PreTrainedModel, path: str, label_index: int | None) -> int:
    names: dict[Any, Any] = dict(model.config.id2label or {})
    if label_index is None and len(names) > 1:
        listed = ", ".join(f"{index}: {name}" for index, name in list(names.items())[:8])
        raise UserInputError(
            f"{path!r} has {len(names)} labels ({listed})",
            where=WHERE,
            hint="say which one is the score: label_index: 0",
        )
    if label_index is not None and label_index >= len(names):
        raise UserInputError(f"label_index is {label_index}, but {path!r} has {len(names)} labels", where=WHERE)
    return label_index or 0
