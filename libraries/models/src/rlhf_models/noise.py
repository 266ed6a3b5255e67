"""Disable the random numbers that a model draws in training mode.

Training mode itself stays on, since gradient checkpointing requires it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rlhf_core.errors import UserInputError
from rlhf_core.models import model_kind_of

_NOISE_RATES = ("layerdrop", "jitter_noise", "input_jitter_noise", "moe_jitter_eps")
_NUM_TOKENS = 4
_TOLERANCE = 0.02
"""Maximum difference between two equal forwards, relative to the largest logit. It is above 16-bit rounding."""


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout and noise rates to 0, so that rollout and update compute log-probs with the same function.

    Args:
        model: transformers model, changed in place, adapters included.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> disable_dropout(model)
        >>> model[1].p
        0.0
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # Rates that a forward pass hands to a function, or uses to skip layers or add router noise.
        _zero_rates(module, lambda name: _is_dropout(name) or name in _NOISE_RATES)
        if hasattr(config := getattr(module, "config", None), "model_type"):
            _zero_rates(config, _is_dropout)  # some models read the rates from the config in each forward pass


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")


def _zero_rates(owner: object, is_rate: Callable[[str], bool]) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and is_rate(name):
            setattr(owner, name, 0.0)


def disable_training_noise(model: nn.Module) -> None:
    """Make a policy on the CPU deterministic in training mode, whatever its source of noise.

    Log-probs of an update are compared with those of the rollout, so both must come from one function. A module whose
    own code draws random numbers (router noise, skipped layers) stays in evaluation mode from now on. A dropout module
    keeps its rate (see `disable_dropout`). Draws that change nothing are harmless. Copies of the model are
    deterministic too. The global generators and the model's mode are left as they were.

    Raises:
        UserInputError: two forwards still differ. The message names the modules that draw.
    """
    was_training = model.training
    model.train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _dropout_disabled(model):
        first, drawing = _watched_forward(model)
        if drawing:
            for module in drawing.values():
                module.train = partial(_stay_in_evaluation, module)  # type: ignore[method-assign]
            model.train()
            first, drawing = _watched_forward(model)
        second, drawing = _watched_forward(model)
    model.train(was_training)
    gap = (first - second).nan_to_num().abs().max()
    if gap > _TOLERANCE * first.nan_to_num().abs().max():
        names = ", ".join(f"{name} ({type(module).__name__})" for name, module in list(drawing.items())[:5])
        raise UserInputError(
            "two forwards of the same tokens in training mode differ: random numbers are drawn in "
            + (names or "code outside of torch's generator"),
            where="model.path",
            hint="switch that noise off in the model's config.json or code: log-probs with noise cannot be compared",
        )


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    type(module).train(module, mode)
    module.training = False
    return module


def _watched_forward(model: nn.Module) -> tuple[Tensor, dict[str, nn.Module]]:
    """Logits of a few tokens, and by name the modules whose own code drew from torch's generator."""
    running: list[nn.Module] = []
    drawing: set[nn.Module] = set()
    state = torch.get_rng_state()

    def record_draws() -> None:
        nonlocal state
        if running and not torch.equal(now := torch.get_rng_state(), state):
            drawing.add(running[-1])
            state = now

    def enter(module: nn.Module, args: Any) -> None:
        record_draws()
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        record_draws()
        running.pop()

    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    ids = torch.arange(_NUM_TOKENS)[None] % int(inner.get_input_embeddings().num_embeddings)
    mask = torch.ones_like(ids)
    inputs = {**model_kind_of(inner).inputs(ids, mask.bool(), {}), "use_cache": False}
    unknown = {"position_ids", "use_cache"} - inspect.signature(inner.forward).parameters.keys()
    known = {name: value for name, value in inputs.items() if name not in unknown}
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        output: Any = model(input_ids=ids, attention_mask=mask, **known)
    finally:
        for hook in hooks:
            hook.remove()
    return output.logits.float(), {name: module for name, module in model.named_modules() if module in drawing}


@contextmanager
def _dropout_disabled(model: nn.Module) -> Iterator[None]:
    """Context without intended dropout, such as an adapter's when training on a dataset."""
    rates = [(m, m.p) for m in model.modules() if isinstance(m, _DropoutNd)]
    for module, _ in rates:
        module.p = 0.0
    try:
        yield
    finally:
        for module, rate in rates:
            module.p = rate
