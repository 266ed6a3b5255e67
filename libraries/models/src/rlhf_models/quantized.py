"""Frozen linear layers with 4- or 8-bit weights, by bitsandbytes (QLoRA, Dettmers 2023, arXiv:2305.14314).

The layers compute the same function in training and evaluation mode, so that log-probs of rollout and update can be
compared: weights are dequantized for each product, and activations are not rounded. bitsandbytes' own layers switch to
other kernels in evaluation mode on a CPU, and round activations to 8 bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import UserInputError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
_BLOCK = 64
"""Weights that share a scale in NF4."""
_BLOCKS_PER_SCALE = 256
"""Blocks whose 8-bit scales share a float32 one."""
_MARK = "rlhf_quantized"
"""Attribute of layers that this module made."""


def check_bitsandbytes() -> None:
    """Raise `UserInputError` if bitsandbytes is not installed."""
    from importlib.util import find_spec

    if find_spec("bitsandbytes") is None:
        raise UserInputError(
            "needs bitsandbytes, which is not installed",
            where="model.quantize",
            hint="pip install 'rlhf-models[quantize]'",
        )


def quantize(model: PreTrainedModel, kind: str) -> None:
    """Replace the linear layers of a model's trunk by frozen quantized ones, one after the other. The head is kept.

    Args:
        model: a loaded model on the CPU, changed in place. All its other weights are frozen, too.
        kind: `nf4` (blocks of 64, with 8-bit scales) or `int8` (one scale per row). With `nf4`, layers whose number of
            inputs is not a multiple of 64 are kept.

    Raises:
        UserInputError: bitsandbytes is missing, or the trunk lacks a linear layer that fits.
    """
    check_bitsandbytes()
    from .peft_warnings import silence_peft

    silence_peft()  # before bitsandbytes is imported
    from torch import nn

    from .quantized_layers import Int8Linear, Nf4Linear

    layer_class: Any = {"nf4": Nf4Linear, "int8": Int8Linear}[kind]
    trunk = model.base_model
    fitting = _fitting_layers(trunk, kind)
    if not fitting:
        raise UserInputError(
            f"{type(model).__name__} lacks linear layers that {kind} can hold",
            where="model.quantize",
            hint="use int8, or a model whose nn.Linear layers have multiples of 64 inputs",
        )
    if kept := sum(type(module) is nn.Linear for module in trunk.modules()) - len(fitting):
        logger.warning("%d linear layers keep full precision: nf4 needs multiples of 64 inputs", kept)
    for name, linear in fitting.items():
        layer = layer_class.of(linear)
        setattr(layer, _MARK, True)
        trunk.set_submodule(name, layer)
    model.requires_grad_(False)
    for name, value in (("is_loaded_in_4bit", kind == "nf4"), ("is_loaded_in_8bit", kind == "int8")):
        setattr(model, name, value)  # for PEFT, which chooses its layers by it


def _fitting_layers(trunk: nn.Module, kind: str) -> dict[str, nn.Linear]:
    """The plain linear layers that `kind` can hold, by name.

    On a CPU, bitsandbytes 0.50.2 dequantizes rows that end within a block of 64 with the scales of other rows.
    """
    from torch import nn

    linear = {name: module for name, module in trunk.named_modules() if type(module) is nn.Linear}
    return {name: module for name, module in linear.items() if kind == "int8" or module.in_features % _BLOCK == 0}


def quantized_sizes(model: Any, kind: str) -> list[tuple[int, int]]:
    """Return the number of weights of each layer that `quantize` would replace, and its bytes with all scales.

    Args:
        model: a model that is not quantized, possibly without weights (on torch's meta device).
        kind: `nf4` or `int8`.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> quantized_sizes(SimpleNamespace(base_model=nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 4))), "nf4")
        [(1024, 532)]
    """
    sizes = []
    for linear in _fitting_layers(model.base_model, kind).values():
        count = linear.in_features * linear.out_features
        blocks = count // _BLOCK
        scales = blocks + 4 * -(-blocks // _BLOCKS_PER_SCALE)
        sizes.append((count, count // 2 + scales if kind == "nf4" else count + 4 * linear.out_features))
    return sizes


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has layers that `quantize` made.

    Args:
        model: any module.

    Example:
        >>> from torch import nn
        >>> is_quantized(nn.Linear(2, 2))
        False
    """
    return any(_MARK in vars(module) for module in model.modules())


def quantized_owner(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """Return the name of the quantized layer that a tensor of the state belongs to, or None.

    Args:
        modules: modules by name.
        name: name of a tensor in the state dict, such as `up.weight` or `up.weight.absmax`.
    """
    for leaf in (".weight", ".SCB", ".bias"):
        owner = name.partition(leaf)[0]
        if leaf in name and _MARK in vars(modules.get(owner, object)):
            return owner
    return None


def dequantized(layer: Any) -> Tensor:
    """Return the weight of a quantized layer.

    Args:
        layer: a layer that `quantize` made.

    Returns:
        [rows, columns] float32, the numbers with which the layer computes in float32.
    """
    import torch

    weight: Tensor = layer.dequantized(torch.float32)
    return weight
