"""Loads a reward model and its tokenizer from a folder or the hub, and checks that the model can score."""

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
    """Return the device and dtype of the model. Raises `UserInputError` if the device does not exist."""
    try:
        resolved = resolve_device(device)
    except UserInputError as error:
        raise UserInputError(error.message, where=f"{WHERE}: device", hint="set device: cpu in its entry") from None
    if dtype == "auto":
        return resolved, torch.float32 if resolved.type == "cpu" else torch.bfloat16
    return resolved, getattr(torch, dtype)


def load(
    path: str, dtype: torch.dtype, label_index: int | None
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, int]:
    """Return the tokenizer, the model (in evaluation mode on the CPU) and the index of the score's label.

    Raises `UserInputError` if one cannot be loaded, the model lacks a trained head, or the label is ambiguous.
    """
    config = ModelConfig(path=str(Path(path).expanduser()))
    hint = None
    try:
        tokenizer = load_tokenizer(config)
        hint = "it needs a trained head: rlhf train --algorithm reward-model trains one"
        model = from_files(config, dtype, "AutoModelForSequenceClassification")
    except UserInputError as error:
        raise UserInputError(error.message, where=WHERE, hint=hint or error.hint) from error
    return tokenizer, model.eval().requires_grad_(False), _label(model, path, label_index)


def _label(model: PreTrainedModel, path: str, label_index: int | None) -> int:
    names: dict[Any, Any] = dict(model.config.id2label or {})
    if label_index is None and len(names) > 1:
        labels = ", ".join(f"{index}: {name}" for index, name in list(names.items())[:8])
        raise UserInputError(
            f"{path!r} has {len(names)} labels ({labels})",
            where=WHERE,
            hint="select the one that is the score: label_index: 0",
        )
    if label_index is not None and label_index >= len(names):
        raise UserInputError(f"label_index is {label_index}, but {path!r} has {len(names)} labels", where=WHERE)
    return label_index or 0
