"""Liger's Triton kernels in a transformers model: norms, rotary embeddings and MLPs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from rlhf_core.errors import ConfigError

_WHERE = "strategy.liger"
_OTHER_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Kernels that replace the model's own loss or its forward, neither of which training uses."""


def check_liger(device: torch.device) -> None:
    """Raise `ConfigError` if Liger's kernels cannot run here.

    Args:
        device: Device of the models.
    """
    if device.type != "cuda":
        raise ConfigError("needs a GPU", where=_WHERE, hint="set liger: false")
    if find_spec("liger_kernel") is None:
        raise ConfigError("needs liger-kernel", where=_WHERE, hint="pip install 'rlhf-torch[cuda]'")


def use_liger(model: nn.Module) -> None:
    """Replace parts of every transformers model in `model` by Liger's kernels, in place.

    Other models of the process keep their own parts, and so does `model` on a CPU for rotary embeddings.

    Args:
        model: A model, or a wrapper of one, such as a critic or an adapter. It is not sharded yet.

    Raises:
        ConfigError: Liger does not support the model's type.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # as transformers' Trainer does
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers import PreTrainedModel

    for outermost in _outermost(model, PreTrainedModel):
        kind = str(outermost.config.model_type)
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ConfigError(f"does not support models of type {kind}", where=_WHERE, hint="set strategy.liger=false")
        with _others_kept(outermost):
            _apply_liger_kernel_to_instance(model=outermost, **_OTHER_LOSSES)


@contextmanager
def _others_kept(model: nn.Module) -> Iterator[None]:
    """Undo what Liger replaces in the modules of transformers, where every other model of the process looks it up.

    Classes are restored, since `model` has its parts already. A function (rotary embeddings) is looked up at each call,
    so that it stays replaced for tensors on a GPU.
    """
    modules = {sys.modules[type(each).__module__] for each in model.modules()}
    families = [module for module in modules if module.__name__.startswith("transformers.models.")]
    before = [(module, name, plain) for module in families for name, plain in vars(module).items()]
    try:
        yield
    finally:
        for module, name, plain in before:
            fast = getattr(module, name)
            if fast is not plain:
                setattr(module, name, plain if isinstance(plain, type) else _OnGpu.of(fast, plain))


class _OnGpu:
    """A function of a model's tensors: `fast` on a GPU, `plain` elsewhere."""

    def __init__(self, fast: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._fast, self._plain = fast, plain

    @classmethod
    def of(cls, fast: Callable[..., Any], plain: Callable[..., Any]) -> _OnGpu:
        """Combine the two. `plain` may be a combination already, of an earlier model."""
        return cls(fast, plain._plain if isinstance(plain, _OnGpu) else plain)

    def __call__(self, first: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return (self._fast if first.is_cuda else self._plain)(first, *arguments, **options)


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[Any]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]
