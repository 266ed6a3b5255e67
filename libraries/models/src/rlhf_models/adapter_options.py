"""Combinations of `model.lora`, `model.quantize` and a model that cannot work, found before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError

from .adapter_start import changes_base
from .quantized import check_bitsandbytes


def check_adapter_options(model: ModelConfig) -> None:
    """Refuse combinations of options that cannot work.

    Args:
        model: the `model:` section of a run file.

    Raises:
        UserInputError: names the option, the reason, and what to change.
    """
    lora, quantized = model.lora, model.quantize
    if lora is not None:
        if lora.dora and changes_base(lora):
            raise UserInputError(
                f"{lora.init} cannot be combined with dora: the trained adapter could not be saved for the base model",
                where="model.lora.init",
                hint="set init: default, or dora: false",
            )
        if lora.init == "orthogonal" and lora.r % 2:
            raise UserInputError(
                f"orthogonal needs an even rank, not {lora.r}", where="model.lora.init", hint=f"set r: {lora.r + 1}"
            )
        if quantized is not None and lora.init not in ("default", "gaussian"):
            raise UserInputError(
                f"{lora.init} needs the base weights in full precision, but model.quantize is {quantized}",
                where="model.lora.init",
                hint="set init: default or gaussian, or quantize: null",
            )
    if quantized is None:
        return
    if lora is None:
        raise UserInputError(
            f"{quantized} weights are frozen, so that there is nothing to train",
            where="model.quantize",
            hint="add model.lora: {r: 16}, or set quantize: null",
        )
    check_bitsandbytes()
    if (Path(model.path) / "adapter_config.json").exists():
        raise UserInputError(
            f"{model.path!r} is an adapter, which cannot be merged into {quantized} weights",
            where="model.quantize",
            hint="merge it first, with rlhf export, and use that folder as model.path",
        )
