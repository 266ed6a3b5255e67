"""Decides which rows may share a forward pass of a model, for trainer and engine alike.

A token's log-prob may depend on the tokens before it in its own row and on nothing else. Requirements by kind of
model:

- Every causal model keeps rows apart when all start in the first column: padding follows them, where no token attends.
  All passes over finished rows run so: scoring, update, critic, reference, reward models.
- Transformers accepted by `packs` need no padding: all tokens are in one row.
- Left padding is neutral only for models that mask it and take each token's position. Decoding batches of prompts
  without slots needs it; `feels_padding` tells for which models it is not neutral.
- Rotary embeddings that depend on the longest row of a pass (`RowLengths`) are computed separately for each row
  (`models/own_lengths.py`), and the engine recomputes a row that reaches a new range of lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

PACKABLE = frozenset(
    {
        "gemma", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_moe", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Model types that pass their forward's arguments on to the attention function, and use position ids only."""

FEELS_PADDING = frozenset({"deepseek_v4", "gpt_neo", "recurrent_gemma", "roformer", "rwkv"})
"""Model types whose output padding changes although their forward takes a mask: by a recurrent state, by positions or
windows counted in columns, or by compressing columns. Others are detected by their forward or their cache."""


def packs(config: Any) -> bool:
    """Whether a transformers model with this config may run samples concatenated in a single row."""
    return (
        config.model_type in PACKABLE
        and config._attn_implementation == "sdpa"
        # The load-balancing loss of experts needs the mask of padded rows.
        and not getattr(config, "output_router_logits", False)
    )


def feels_padding(config: Any, forward_parameters: Iterable[str]) -> str | None:
    """Why padding before a row, or between it and its next token, changes the row's output; None if it is neutral.

    Where it does, only rows of one length may decode together.
    forward_parameters: the names that the model's forward takes.
    """
    kind = getattr(config, "model_type", None)
    if kind in FEELS_PADDING:
        return f"{kind} feels empty columns"
    if not {"position_ids", "attention_mask"} <= set(forward_parameters):
        return "its forward takes no position_ids and attention_mask"
    from transformers.cache_utils import DynamicLayer

    if not all(isinstance(layer, DynamicLayer) for layer in _cache_layers(config)):
        return "it has a recurrent state, which padding would change"
    return None


def carries_state(config: Any) -> bool:
    """Whether a layer carries state from token to token that no attention mask stops between samples of a row."""
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    layers = _cache_layers(config)
    return getattr(config, "model_type", None) in FEELS_PADDING or any(
        isinstance(e, LinearAttentionCacheLayerMixin) for e in layers
    )


def _cache_layers(config: Any) -> list[Any]:
    from transformers import DynamicCache

    return DynamicCache(config=config).layers


@dataclass(frozen=True, slots=True)
class RowLengths:
    """How the rotary embeddings of a model change with the length of its row."""

    switches: frozenset[int]
    """Lengths beyond which a prefix has another embedding, the same for all longer ones (`longrope`)."""
    limit: int | None
    """Length beyond which every row length has its own embedding (`dynamic` NTK); None if there is none."""

    @classmethod
    def of(cls, model: nn.Module) -> RowLengths | None:
        """The model's rules, also inside wrappers and critics; None if its embedding is the same at all lengths."""
        pairs = {pair for module in model.modules() for pair in _rotary_parameters(module)}
        if not pairs:
            return None
        limits = [limit for kind, limit in pairs if kind == "dynamic"]
        return cls(frozenset(n for kind, n in pairs if kind == "longrope"), min(limits, default=None))

    @property
    def kind(self) -> str:
        """transformers' name of the kind."""
        return "longrope" if self.switches else "dynamic"

    def begins_anew(self, length: int) -> bool:
        """Whether a row of `length` tokens has other embeddings than with one token fewer.

        The engine makes no row beyond `limit`, which is all the positions such a model has.
        """
        return length - 1 in self.switches


def is_length_dependent(rotary: nn.Module) -> bool:
    """Whether this module itself is a rotary embedding that depends on the longest row."""
    return bool(_rotary_parameters(rotary))


def _rotary_parameters(module: nn.Module) -> list[tuple[str, int]]:
    # `rope_type` and `inv_freq`: transformers' rotary modules, whatever their class is called.
    return _parameters_of(getattr(module, "config", None)) if hasattr(module, "rope_type") else []


def _parameters_of(config: Any) -> list[tuple[str, int]]:
    """For each length-dependent rotary embedding: its kind, and the length up to which it is constant."""
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, Mapping):
        return []
    layers = [given, *(each for each in given.values() if isinstance(each, Mapping))]
    found = []
    for parameters in layers:
        kind = parameters.get("rope_type")
        if kind == "longrope":
            found.append(("longrope", int(parameters["original_max_position_embeddings"])))
        elif kind == "dynamic":
            found.append(("dynamic", int(config.max_position_embeddings)))
    return found
