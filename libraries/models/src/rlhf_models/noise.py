"""Switch off the random numbers that a model draws in training mode.

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
"""Largest difference of two equal forwards, relative to the largest logit: above the rounding of 16 bits."""


def disable_dropout(model: nn.Module) -> None:
    """Set every rate of dropout and noise to 0, so that rollout and update compute log-probs by the same function.

    Adapters included.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # Rates that a forward passes to a function, or uses to skip layers or add router noise.
        _zero_rates(module, lambda name: _is_dropout(name) or name in _NOISE_RATES)
        if hasattr(config := getattr(module, "config", None), "model_type"):
            _zero_rates(config, _is_dropout)  # some models read the rates from the config in each forward


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")


def _zero_rates(owner: object, is_rate: Callable[[str], bool]) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and is_rate(name):
            setattr(owner, name, 0.0)


def disable_training_noise(model: nn.Module) -> None:
    """Make a policy, on the CPU, compute the same in each forward of training mode, whatever its noise is called.

    Log-probs of an update are compared with those of the rollout, so both must come from one function. A module whose
    own code draws random numbers (router noise, skipped layers) stays in evaluation mode from here on; a dropout
    module keeps its rate (see `disable_dropout`). Draws that change nothing are harmless, and a copy
    of the model stays quiet too. Leaves the global generators and the mode of the model as they were.

    Raises:
        UserInputError: two forwards still differ; names the modules that draw.
    """
    was_training = model.training
    model.train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _rates_of_dropout_modules_at_0(model):
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
    """The logits of a few tokens, and by name the modules whose own code drew from torch's generator."""
    running: list[nn.Module] = []
    drawing: set[nn.Module] = set()
    state = torch.get_rng_state()

    def look() -> None:
        nonlocal state
        if running and not torch.equal(now := torch.get_rng_state(), state):
            drawing.add(running[-1])
            state = now

    def enter(module: nn.Module, args: Any) -> None:
        look()
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        look()
        running.pop()

    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    ids = torch.arange(_NUM_TOKENS)[None] % int(inner.get_input_embeddings().num_embeddings)
    mask = torch.ones_like(ids)
    inputs = {**model_kind_of(inner).inputs(ids, mask.bool(), {}), "use_cache": False}
    left_out = {"position_ids", "use_cache"} - inspect.signature(inner.forward).parameters.keys()
    given = {name: value for name, value in inputs.items() if name not in left_out}
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        output: Any = model(input_ids=ids, attention_mask=mask, **given)
    finally:
        for hook in hooks:
            hook.remove()
    return output.logits.float(), {name: module for name, module in model.named_modules() if module in drawing}


@contextmanager
def _rates_of_dropout_modules_at_0(model: nn.Module) -> Iterator[None]:
    """Context without the dropout that is meant: an adapter's, where a dataset is learned."""
    rates = [(m, m.p) for m in model.modules() if isinstance(m, _DropoutNd)]
    for module, _ in rates:
        module.p = 0.0
    try:
        yield
    finally:
        for module, rate in rates:
            module.p = rate
