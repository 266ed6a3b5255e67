"""Chooses a model's generation path by a trial on a few tokens, not by its model type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rlhf_forward import padding_problem

from .forward import ModelForward
from .lockstep import LockstepModel, Way
from .slot_model import SlotModel

_PROMPTS = ((5, 3, 7, 2, 6), (4, 1, 3))
_FORCED = ((2, 4), (6, 5))
"""Tokens of the trial (modulo the vocabulary): two prompts of different lengths, two tokens fed to each."""


@dataclass(frozen=True, slots=True)
class Path:
    """The fastest path that reproduces a plain forward pass, and the reasons why faster ones do not."""

    name: Literal["slots", "padded", "equal", "recompute"]
    reasons: tuple[str, ...] = ()


def choose_path(forward: ModelForward) -> Path:
    """Try the paths from fastest to safest. Call it in eval mode without gradients."""
    reasons: list[str] = []
    expected = _plain(forward)
    trials: tuple[tuple[Literal["slots"] | Way, Callable[[], str | None], Callable[[], Tensor]], ...] = (
        ("slots", lambda: _slots_obstacle(forward), lambda: _try_slots(forward)),
        ("padded", lambda: _padding_obstacle(forward), lambda: _try_lockstep(forward, "padded")),
        ("equal", lambda: _cache_obstacle(forward), lambda: _try_lockstep(forward, "equal")),
    )
    for name, obstacle, trial in trials:
        reason = obstacle() or _failure(trial, expected)
        if reason is None:
            return Path(name, tuple(reasons))
        reasons.append(f"{name}: {reason}")
    return Path("recompute", tuple(reasons))


def _failure(trial: Callable[[], Tensor], expected: Tensor) -> str | None:
    """Reason why a generation path fails, None if it computes the expected logits [2, V]."""
    try:
        logits = trial().float()
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError, AssertionError) as error:
        # A model that does not support this path may fail anywhere inside. The reason is logged.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    gap = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    tolerance = 1e-3 if expected.dtype is torch.float32 else 5e-2
    return None if gap <= tolerance else f"its logits differ from a plain forward by {gap:.1e} of their size"


def _slots_obstacle(forward: ModelForward) -> str | None:
    if not forward.accepts_keys_and_values or not forward.accepts_positions_and_mask:
        return "its forward does not accept a cache of keys and values, position_ids and attention_mask"
    implementation = getattr(forward.config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        return f"attention {implementation} does not support a mask per row"
    layers = DynamicCache(config=forward.config).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        return "it has a sliding window, a recurrent state or a cache other than plain keys and values"
    return _padding_obstacle(forward)


def _padding_obstacle(forward: ModelForward) -> str | None:
    if not forward.accepts_keys_and_values:
        return "its forward does not accept a cache of keys and values"
    if forward.length_switches is not None:
        return "its rotary embedding depends on the longest row"
    return padding_problem(forward.config, forward.parameters)


def _cache_obstacle(forward: ModelForward) -> str | None:
    return None if forward.cache_name else "its forward does not accept a cache"


def _plain(forward: ModelForward) -> Tensor:
    """[2, V] next-token logits of the full sequences, computed one at a time without a cache."""
    logits = []
    for prompt, forced in zip(*_tokens(forward), strict=True):
        ids = torch.tensor([[*prompt, *forced]], device=forward.device)
        positions = torch.arange(ids.shape[1], device=forward.device)[None]
        logits.append(forward(ids, position_ids=positions)[0][0, -1])
    return torch.stack(logits)


def _try_slots(forward: ModelForward) -> Tensor:
    prompts, forced = _tokens(forward)
    model = SlotModel(forward, num_slots=3, max_tokens=8)
    _, layers = model.prefill(prompts)
    model.cache.fill([1, 0], layers, [0, 1])
    # The rows are in reverse order, so that reading a neighbor's slot is detected.
    for step in range(2):
        fed = [forced[1][step], forced[0][step]]
        logits = model.decode(fed, [len(prompts[1]) + step, len(prompts[0]) + step])
    return logits.flip(0)


def _try_lockstep(forward: ModelForward, way: Way) -> Tensor:
    prompts, forced = _tokens(forward)
    model = LockstepModel(forward, way)
    if way == "padded":
        return _feed(model, prompts, forced)
    return torch.cat([_feed(model, [p], [f]) for p, f in zip(prompts, forced, strict=True)])


def _feed(model: LockstepModel, prompts: list[list[int]], forced: list[list[int]]) -> Tensor:
    model.start(prompts)
    for count in (1, 2):
        logits = model.step([[*p, *f[:count]] for p, f in zip(prompts, forced, strict=True)])
    return logits


def _tokens(forward: ModelForward) -> tuple[list[list[int]], list[list[int]]]:
    size = forward.embedding.shape[0]
    prompts, forced = ([[token % size for token in row] for row in rows] for rows in (_PROMPTS, _FORCED))
    return prompts, forced
