"""Properties of transformers' model types. Add new types to this list."""

from __future__ import annotations

from typing import Any, Literal

Trait = Literal["packs", "plain-head", "gated-mlp", "feels-padding"]
"""packs: the forward hands its arguments to the attention function, and otherwise depends on a row only by position
ids. plain-head: logits are the head's output (no soft cap, no scale). gated-mlp: its only class `...MLP` computes
`down(act(gate(x)) * up(x))`. feels-padding: padding changes the output although the forward accepts a mask, by a
recurrent state, by positions or windows counted in columns, or by compression of columns.
"""

ARCHITECTURES: dict[str, tuple[Trait, ...]] = {
    "deepseek_v4": ("feels-padding",),
    "gemma": ("packs", "gated-mlp"),
    "gpt_neo": ("feels-padding",),
    "granite": ("packs", "gated-mlp"),
    "llama": ("packs", "plain-head", "gated-mlp"),
    "mistral": ("packs", "plain-head", "gated-mlp"),
    "mixtral": ("packs", "plain-head"),
    "olmo": ("packs", "gated-mlp"),
    "olmo2": ("packs", "plain-head", "gated-mlp"),
    "phi3": ("packs", "plain-head"),
    "qwen2": ("packs", "plain-head", "gated-mlp"),
    "qwen2_moe": ("packs", "plain-head"),
    "qwen3": ("packs", "plain-head", "gated-mlp"),
    "qwen3_moe": ("packs", "plain-head"),
    "recurrent_gemma": ("feels-padding",),
    "roformer": ("feels-padding",),
    "rwkv": ("feels-padding",),
    "smollm3": ("packs", "plain-head", "gated-mlp"),
    "stablelm": ("plain-head",),
    "starcoder2": ("packs",),
}


def with_trait(trait: Trait) -> frozenset[str]:
    """Return the model types that have `trait`."""
    return frozenset(name for name, traits in ARCHITECTURES.items() if trait in traits)


def has_trait(config: Any, trait: Trait) -> bool:
    """Whether the model type of a transformers config (None for other models) has `trait`."""
    return trait in ARCHITECTURES.get(getattr(config, "model_type", ""), ())
