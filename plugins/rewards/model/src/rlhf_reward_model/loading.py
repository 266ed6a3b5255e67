"""A reward model and its tokenizer from a folder or the hub, checked before it scores anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.errors import UserInputError, first_line
from rlhf_core.place import resolve_device
from rlhf_models import check_hub, quiet_progress

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


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The reward model's own tokenizer. Raises `UserInputError` where there is none."""
    source = str(Path(path).expanduser())
    check_hub(source, where=WHERE)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise UserInputError(
            f"cannot load the tokenizer of {path!r}: {first_line(error)}",
            where=WHERE,
            hint="tokenizer.save_pretrained(folder) beside the model",
        ) from None
    return tokenizer


def load_model(path: str, dtype: torch.dtype, label_index: int | None) -> tuple[PreTrainedModel, int]:
    """The model, in evaluation mode on the CPU, and the label that is the score.

    Raises `UserInputError`: it cannot be loaded, has no trained head, or several labels and none was chosen.
    """
    source = str(Path(path).expanduser())
    check_hub(source, where=WHERE)
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    try:
        with quiet_progress():
            model, info = AutoModelForSequenceClassification.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserInputError(f"cannot load {path!r}: {first_line(error)}", where=WHERE) from None
    if info["missing_keys"]:
        raise UserInputError(
            f"{path!r} is no reward model: it lacks the weights {', '.join(sorted(info['missing_keys'])[:4])}, "
            "which would be random",
            where=WHERE,
            hint="train one: rlhf train --algorithm reward-model",
        )
    return model.eval().requires_grad_(False), _label(model, path, label_index)


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
