"""Writes the policy of a run or checkpoint as a plain model folder, for `rlhf export`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from rlhf_core.config import ModelConfig
from rlhf_core.entry.resume import load_run_config
from rlhf_core.errors import CheckpointError, UserInputError
from rlhf_core.models import model_kind_of
from rlhf_core.rollout import named_weights
from rlhf_core.runfolder import find_complete_checkpoint
from rlhf_models import (
    is_lora,
    load_policy,
    load_tokenizer,
    merged_weights,
    read_weights,
    replacing_folder,
    save_adapter,
    stored_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

Dtype = Literal["float32", "bfloat16", "float16"]
_POLICY = "policy"
"""Folder of the policy in a checkpoint, the same for every strategy."""


def export_model(source: Path, target: Path, *, merge_lora: bool = False, dtype: Dtype | None = None) -> Path:
    """Write the policy of a run's newest checkpoint, or of a checkpoint, to a folder with its tokenizer.

    A LoRA run is exported as its adapter for PEFT. Never executes code that the run names.

    Args:
        source: folder of a run or a checkpoint.
        target: new or empty folder.
        merge_lora: write the whole model of a LoRA run, with the adapter merged.
        dtype: type of the stored weights. None keeps the checkpoint's.

    Returns:
        The exported checkpoint.

    Raises:
        UserInputError: if a run or a complete checkpoint is not found, `target` is not empty, or an adapter's base
            model cannot be loaded by others.
        CheckpointError: if the checkpoint belongs to another model.
    """
    from safetensors import SafetensorError

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserInputError("already exists", where=str(target), hint="choose another folder: --to DIR")
    checkpoint = _checkpoint(source)
    config, seed = _model_of(checkpoint.parent.parent)
    folder = checkpoint / _POLICY
    weights = dict(read_weights(folder))
    tokenizer = load_tokenizer(config)
    policy = load_policy(config, dtype=stored_dtype(folder), seed=seed, tokenizer=tokenizer, kind=_kind(weights))
    _check_fit(policy, weights, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing_folder(target) as partial:
            if is_lora(policy) and not merge_lora:
                _name_base(policy, config)
                save_adapter(policy, _cast(weights, dtype), partial)
                tokenizer.save_pretrained(partial)
            else:
                base: Any = policy
                if is_lora(policy):
                    base, weights = policy.get_base_model(), merged_weights(policy, weights)
                kind: Any = model_kind_of(base)
                kind.save(base, _cast(weights, dtype), tokenizer, partial)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk with its own error class
        raise UserInputError(f"cannot be written: {error}", where=str(target), hint="is the disk full?") from error
    return checkpoint


def _checkpoint(source: Path) -> Path:
    checkpoint = find_complete_checkpoint(source)
    if checkpoint is None:
        hint = "pass a run's folder, or one of its checkpoints/step-N"
        if (source / "model" / "config.json").exists():
            hint = f"its trained model is {source / 'model'}"
        raise UserInputError("contains no complete checkpoint", where=str(source), hint=hint)
    return checkpoint


def _model_of(run_folder: Path) -> tuple[ModelConfig, int]:
    """The section `model` of a run's config, and the run's seed."""
    config = load_run_config(run_folder)
    train = config.get("train")
    try:
        model = ModelConfig.model_validate(config.get("model"))
        seed = int(train.get("seed", 0)) if isinstance(train, dict) else 0
    except (ValidationError, TypeError, ValueError) as error:
        raise UserInputError("its config.yaml does not describe a model", where=str(run_folder)) from error
    if model.trust_remote_code:
        raise UserInputError(
            f"{model.path} contains its own code, which this command does not run",
            where=str(run_folder),
            hint="use model/, which the run wrote, or resume the run with --trust",
        )
    return model, seed


def _kind(weights: Iterable[str]) -> str:
    """Return the kind of a model by the names of its weights. A score model has a head for scores."""
    is_score = any(".score." in f".{name}" for name in weights)
    return "sequence-classification" if is_score else "causal-lm"


def _check_fit(policy: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    live = named_weights(policy)
    wrong = sorted(live.keys() ^ weights.keys())
    wrong += [name for name in live.keys() & weights.keys() if live[name].shape != weights[name].shape]
    if wrong:
        raise CheckpointError(
            f"does not fit the model that the run's config.yaml names: {', '.join(wrong[:5])}",
            where=str(folder),
            hint="is model.path still the model that the run started from?",
        )


def _name_base(policy: Any, config: ModelConfig) -> None:
    """Write the base model's path into the adapter's config. Raises `UserInputError` if PEFT could not load it."""
    base = Path(config.path)
    if config.path.startswith("builtin:") or (base / "adapter_config.json").exists():
        raise UserInputError(
            f"the base {config.path} is not a model folder or hub name, so the adapter could not be loaded onto it",
            where="--to",
            hint="add --merge-lora to write the whole model",
        )
    for each in policy.peft_config.values():
        each.base_model_name_or_path = os.path.abspath(base) if base.is_dir() else config.path


def _cast(weights: Mapping[str, Tensor], dtype: Dtype | None) -> dict[str, Tensor]:
    import torch

    if dtype is None:
        return dict(weights)
    kind = getattr(torch, dtype)
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
