"""Which rows may share a forward pass of a model: the one place that trainer and engine ask.

A token's log-prob may depend on the tokens before it in its own row and on nothing else. What a kind of model needs
for that:

- Every causal model keeps its rows apart when all start in the first column: padding stands behind them, where no
  token looks. So run all passes over finished rows: scoring, update, critic, reference, reward models.
- Transformers that `packs` names do without padding: all tokens lie in one row (`functional/packing.py`).
- Padding in front is neutral only to models that mask it and are told each token's position. Decoding batches of
  prompts needs it, where there are no slots; `feels_padding` says to which models it must not be done.
- Rotary embeddings that are computed for the longest row of a pass (`RowLengths`) are computed for each row by
  itself (`functional/own_lengths.py`), and a row that reaches a new range of lengths is begun anew by the engine.
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
"""Model types that hand what their forward is given on to the attention function, and know places by position ids."""

FEELS_PADDING = frozenset({"deepseek_v4", "gpt_neo", "recurrent_gemma", "roformer", "rwkv"})
"""Model types that empty columns change although their forward takes a mask: by a recurrent state, by a position or a
window counted in columns, or by compressing columns together. More are known by their forward or their cache."""


def packs(config: Any) -> bool:
    """Whether samples may lie one behind the other in a single row, of a transformers model with this config."""
    return (
        config.model_type in PACKABLE
        and config._attn_implementation == "sdpa"
        # A loss that balances experts needs the mask of padded rows.
        and not getattr(config, "output_router_logits", False)
    )


def feels_padding(config: Any, forward_parameters: Iterable[str]) -> str | None:
    """Why padding before a row, or between it and its next token, changes the row; None if it is neutral.

    Only rows of one length may decode together where it does.
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
    """Whether a layer hands something from token to token that no attention mask stops between samples of a row."""
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
    """Tokens after which a longer prefix has another embedding, the same for all longer ones (`longrope`)."""
    limit: int | None
    """Tokens after which each length of a whole row has one of its own (`dynamic` NTK); None where none has."""

    @classmethod
    def of(cls, model: nn.Module) -> RowLengths | None:
        """None for a model whose rotary embedding is the same at all lengths. Wrappers and critics are seen through."""
        pairs = {pair for module in model.modules() for pair in _rotary_parameters(module)}
        if not pairs:
            return None
        limits = [limit for kind, limit in pairs if kind == "dynamic"]
        return cls(frozenset(n for kind, n in pairs if kind == "longrope"), min(limits, default=None))

    @property
    def kind(self) -> str:
        """As transformers calls it."""
        return "longrope" if self.switches else "dynamic"

    def begins_anew(self, length: int) -> bool:
        """Whether a row of `length` tokens has other embeddings than it had with one token less.

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
    """Kind and number of tokens up to which nothing changes, of each rotary embedding that depends on a length."""
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
