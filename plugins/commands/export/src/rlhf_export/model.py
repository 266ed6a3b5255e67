"""Writes the policy of a run, a checkpoint or a model folder as a plain model folder, for `rlhf export`."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from rlhf_core.config import ModelConfig
from rlhf_core.entry.resume import load_run_config
from rlhf_core.errors import CheckpointError, UserInputError
from rlhf_core.models import model_kind_of
from rlhf_core.rollout import named_weights
from rlhf_core.runfolder import RunFolder, find_complete_checkpoint
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

from .card import CARD, write_card
from .card_facts import read_card_facts

if TYPE_CHECKING:
    from torch import Tensor

Dtype = Literal["float32", "bfloat16", "float16"]
_POLICY = "policy"
"""Folder of the policy in a checkpoint, the same for every strategy."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A policy to write."""

    source: Path
    config: ModelConfig
    policy: Any
    weights: dict[str, Tensor]
    tokenizer: Any


def export_model(source: Path, target: Path, *, merge_lora: bool = False, dtype: Dtype | None = None) -> Path:
    """Write a policy to a folder with its tokenizer and its model card.

    A LoRA run is exported as its adapter for PEFT. Never executes code that the run names.

    Args:
        source: folder of a run, of which the newest checkpoint is exported, of a checkpoint, or of a model.
        target: new or empty folder.
        merge_lora: write the whole model of a LoRA run or an adapter, with the adapter merged.
        dtype: type of the stored weights. None keeps the type of `source`.

    Returns:
        The exported checkpoint or model folder.

    Raises:
        UserInputError: if a run or a complete checkpoint is not found, `target` is not empty, or an adapter's base
            model cannot be loaded by others.
        CheckpointError: if the checkpoint belongs to another model.
    """
    from safetensors import SafetensorError

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserInputError("already exists", where=str(target), hint="choose another folder: --to DIR")
    loaded = _load_folder(source, merge_lora) if is_model_folder(source) else _load_checkpoint(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing_folder(target) as partial:
            _write(loaded, partial, merge_lora=merge_lora, dtype=dtype)
            _add_card(loaded.source, partial)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk with its own error class
        raise UserInputError(f"cannot be written: {error}", where=str(target), hint="is the disk full?") from error
    return loaded.source


def is_model_folder(path: Path) -> bool:
    """Whether a folder contains a model or an adapter, in contrast to a run or a checkpoint."""
    return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))


def final_model(source: Path, *, merge_lora: bool) -> Path | None:
    """Return the folder that a finished run has written for what `export_model` would export, None if there is none."""
    if is_model_folder(source):
        return None if merge_lora and (source / "adapter_config.json").is_file() else source
    folder = RunFolder(source)
    if not folder.holds_run or folder.read_json(folder.summary).get("model") != folder.model.name:
        return None
    written = folder.model if merge_lora or not folder.adapter.is_dir() else folder.adapter
    return written if is_model_folder(written) else None


def _write(loaded: _Loaded, folder: Path, *, merge_lora: bool, dtype: Dtype | None) -> None:
    policy, weights, tokenizer = loaded.policy, loaded.weights, loaded.tokenizer
    if is_lora(policy) and not merge_lora:
        _name_base(policy, loaded.config)
        save_adapter(policy, _cast(weights, dtype), folder)
        tokenizer.save_pretrained(folder)
        return
    if is_lora(policy):
        policy, weights = policy.get_base_model(), merged_weights(policy, weights)
    kind: Any = model_kind_of(policy)
    kind.save(policy, _cast(weights, dtype), tokenizer, folder)


def _add_card(source: Path, folder: Path) -> None:
    """Write the card of a checkpoint's model, or copy that of a model folder."""
    if not is_model_folder(source):
        step = source.resolve().name.removeprefix("step-")
        write_card(folder, read_card_facts(RunFolder.read(source.parent.parent), int(step) if step.isdigit() else None))
    elif (source / CARD).is_file():
        shutil.copyfile(source / CARD, folder / CARD)


def _load_folder(source: Path, merge_lora: bool) -> _Loaded:
    is_adapter = (source / "adapter_config.json").is_file()
    if is_adapter and not merge_lora:
        raise UserInputError("is an adapter already", where=str(source), hint="--merge-lora writes the whole model")
    config = ModelConfig(path=str(source))
    kind = "sequence-classification" if _is_classifier(source) else "causal-lm"
    tokenizer = load_tokenizer(config)
    import torch

    dtype = torch.float32 if is_adapter else stored_dtype(source)
    policy = load_policy(config, dtype=dtype, seed=0, tokenizer=tokenizer, kind=kind)
    return _Loaded(
        source, config, policy, {name: each.detach() for name, each in named_weights(policy).items()}, tokenizer
    )


def _is_classifier(folder: Path) -> bool:
    file = next(each for each in (folder / "config.json", folder / "adapter_config.json") if each.is_file())
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserInputError(f"its {file.name} cannot be read: {error}", where=str(folder)) from error
    names = [*(config.get("architectures") or []), config.get("task_type")]
    return any(str(name).endswith("ForSequenceClassification") or name == "SEQ_CLS" for name in names)


def _load_checkpoint(source: Path) -> _Loaded:
    checkpoint = find_complete_checkpoint(source)
    if checkpoint is None:
        hint = "pass a run's folder, one of its checkpoints/step-N, or a model folder"
        if (source / "model" / "config.json").exists():
            hint = f"its trained model is {source / 'model'}"
        raise UserInputError("contains no complete checkpoint", where=str(source), hint=hint)
    config, seed = _model_of(checkpoint.parent.parent)
    folder = checkpoint / _POLICY
    weights = dict(read_weights(folder))
    tokenizer = load_tokenizer(config)
    dtype = stored_dtype(folder) if config.quantize is None else _dtype_before_quantization(weights)
    policy = load_policy(config, dtype=dtype, seed=seed, tokenizer=tokenizer, kind=_kind(weights))
    _check_fit(policy, weights, folder)
    return _Loaded(checkpoint, config, policy, weights, tokenizer)


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


def _dtype_before_quantization(weights: Mapping[str, Tensor]) -> Any:
    """The type that a quantized policy was loaded in: that of its embeddings, norms and head."""
    import torch

    others = {
        each.dtype
        for name, each in weights.items()
        if each.is_floating_point()
        and not any(part in name for part in ("lora_", ".weight.", ".SCB", "modules_to_save"))
    }
    return functools.reduce(torch.promote_types, others)


def _check_fit(policy: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    live = named_weights(policy)
    wrong = sorted(live.keys() ^ weights.keys())
    wrong += [name for name in live.keys() & weights.keys() if live[name].shape != weights[name].shape]
    if not wrong:  # quantized weights are merged as the model's folder gives them
        wrong = [name for name, each in live.items() if not (each.is_floating_point() or each.equal(weights[name]))]
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
