"""Tiny models for the quickstart and for tests, `builtin:NAME`: folders of core without weights, made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "builtin:"
_FOLDERS = Path(__file__).parent / "builtin_models"


def builtin_folder(path: str) -> Path:
    """Config and tokenizer of `builtin:NAME`. Raises `UserInputError` where there is no such built-in model."""
    names = sorted(each.name for each in _FOLDERS.iterdir())
    if (name := path.removeprefix(PREFIX)) not in names:
        raise UserInputError(
            f"there is no built-in model {name!r}",
            where="model.path",
            hint=f"one of {', '.join(PREFIX + each for each in names)}, a model folder, or a hub name",
        )
    return _FOLDERS / name


def build_builtin(path: str, seed: int) -> PreTrainedModel:
    """The model of `builtin:NAME` in float32, the same for the same seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(builtin_folder(path))
    config.name_or_path = ""  # an adapter would name core's folder, which has no weights, as its base
    # Initialisation draws from torch's global generator; the fork keeps it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
