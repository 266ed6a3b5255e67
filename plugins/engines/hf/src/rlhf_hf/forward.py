"""Calls any transformers causal LM in generation mode, with only the arguments that its forward accepts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.models import model_kind_of
from rlhf_forward import innermost, length_switches

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the argument and output attribute for the cache. transformers' own models have the first one since 5.24.
Before, they had the others, which models with their own code may keep."""


class ModelForward:
    """One forward pass with explicit positions, and logits only where requested."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.base = innermost(module)  # below a PEFT wrapper, whose forward takes `**kwargs`
        self.config: Any = self.base.config
        self.kind = model_kind_of(self.base)
        known = frozenset(inspect.signature(self.base.forward).parameters)
        self.parameters = known
        """Names of its forward's parameters."""
        self.length_switches = length_switches(self.base)
        """Lengths beyond which its rotary embedding changes, None if it never does."""
        self.embedding: Tensor = self.base.get_input_embeddings().weight  # type: ignore[operator]
        """[V, hidden]. Its dtype is that of the hidden states, and of masks added to attention scores."""
        self._accepts = {
            name: name in known for name in ("position_ids", "logits_to_keep", "attention_mask", "use_cache")
        }
        self.cache_name = next((name for name in CACHE_NAMES if name in known), None)
        """Name of the argument for the cache, None without a cache."""

    @property
    def accepts_positions_and_mask(self) -> bool:
        return self._accepts["position_ids"] and self._accepts["attention_mask"]

    @property
    def accepts_keys_and_values(self) -> bool:
        """Whether the cache may hold keys and values. Models with a recurrent state alone may accept a `cache`, too."""
        return self.cache_name in ("cache", "past_key_values")

    @property
    def text_config(self) -> Any:
        get = getattr(self.config, "get_text_config", None)
        return get(decoder=True) if callable(get) else self.config

    @property
    def context_tokens(self) -> int | None:
        """Maximum sequence length, None if the config does not specify one."""
        bound = getattr(self.text_config, "max_position_embeddings", None)
        return bound if isinstance(bound, int) and bound > 0 else None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def __call__(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        use_cache: bool = False,
        keep: Tensor | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Any]:
        """Logits [B, K, V] at the K positions of `keep` (default: the last), and the cache after the pass.

        `input_ids` [B, T] int64, `position_ids` [B, T] int64, `attention_mask` [B, S] bool or, additive,
        [B, 1, T, S] float. `inputs`: additional arguments of the model.
        """
        arguments: dict[str, Any] = {"input_ids": input_ids, **(inputs or {})}
        if position_ids is not None and self._accepts["position_ids"]:
            arguments["position_ids"] = position_ids
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        if self._accepts["use_cache"]:
            arguments["use_cache"] = use_cache
        if cache is not None and self.cache_name is not None:
            arguments[self.cache_name] = cache
        if self._accepts["logits_to_keep"]:
            arguments["logits_to_keep"] = 1 if keep is None else keep
        output = self.module(**arguments)
        logits = output.logits
        if not self._accepts["logits_to_keep"]:
            logits = logits[:, -1:] if keep is None else logits.index_select(1, keep)
        return logits, self._cache_of(output) if self.cache_name else None

    @staticmethod
    def _cache_of(output: Any) -> Any:
        """Cache after the pass. Its name may be a newer one than the argument's: transformers renames it in outputs."""
        return next((getattr(output, name) for name in CACHE_NAMES if hasattr(output, name)), None)


@contextmanager
def generating(module: nn.Module) -> Iterator[None]:
    """Context with eval mode and without gradients. Restores every submodule's training flag afterwards.

    Not `inference_mode`, since a buffer that a forward replaces would be unusable in training.
    """
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
