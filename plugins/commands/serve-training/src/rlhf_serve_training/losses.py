"""Losses of the API by name, per position.

The losses that `rlhf train` has are its own functions (`rlhf_objective`). A loss of the API is the sum over positions,
without a division: the client's weights and advantages contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_objective import cispo_policy_loss, importance_ratio, ppo_policy_loss

from .wire import InvalidRequest, Row

Fields = Mapping[str, Tensor]
"""Name -> [B, W] float32, 0 on padding."""
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss with its options."""

    name: str
    config: Mapping[str, float]
    function: Callable[[Tensor, Fields, Tensor, Mapping[str, float]], Tensor]

    def __call__(self, log_probs: Tensor, fields: Fields, mask: Tensor) -> Tensor:
        """Return the loss of each position, [B, W] or [B, W, K], 0 outside of the mask.

        Args:
            log_probs: [B, W] or [B, W, K] nats of the targets.
            fields: inputs of the loss, in the shape of `log_probs`.
            mask: [B, W] bool, True = a position with a target.
        """
        return self.function(log_probs, fields, mask, self.config)


def _cross_entropy(log_probs: Tensor, fields: Fields, mask: Tensor, config: Mapping[str, float]) -> Tensor:
    mask = mask if log_probs.ndim == 2 else mask.unsqueeze(-1)
    return torch.where(mask, -log_probs * fields["weights"], 0.0)


def _importance_sampling(log_probs: Tensor, fields: Fields, mask: Tensor, config: Mapping[str, float]) -> Tensor:
    ratio = importance_ratio(log_probs, fields["logprobs"], mask)
    return torch.where(mask, -ratio * fields["advantages"], 0.0)


def _ppo(log_probs: Tensor, fields: Fields, mask: Tensor, config: Mapping[str, float]) -> Tensor:
    low, high = _clip(config)
    old, advantages = fields["logprobs"], fields["advantages"]
    return ppo_policy_loss(log_probs, old, advantages, mask, clip_eps_low=low, clip_eps_high=high).losses


def _cispo(log_probs: Tensor, fields: Fields, mask: Tensor, config: Mapping[str, float]) -> Tensor:
    low, high = _clip(config)
    old, advantages = fields["logprobs"], fields["advantages"]
    return cispo_policy_loss(log_probs, old, advantages, mask, clip_eps_low=low, clip_eps_high=high).losses


def _gspo(log_probs: Tensor, fields: Fields, mask: Tensor, config: Mapping[str, float]) -> Tensor:
    low, high = _clip(config)
    old, advantages = fields["logprobs"], fields["advantages"]
    in_ratio = mask & (fields["sequence_ratio_mask"] != 0)
    clip = {"clip_eps_low": low, "clip_eps_high": high}
    return ppo_policy_loss(log_probs, old, advantages, in_ratio, **clip, ratio_level="sequence").losses


def _dro(log_probs: Tensor, fields: Fields, mask: Tensor, config: Mapping[str, float]) -> Tensor:
    log_ratio = torch.where(mask, log_probs - fields["logprobs"], 0.0)
    gain = torch.where(mask, log_probs, 0.0) * fields["advantages"] - 0.5 * config["beta"] * log_ratio.square()
    return torch.where(mask, -gain, 0.0)


def _clip(config: Mapping[str, float]) -> tuple[float, float]:
    """Distances of the ratio's bounds from 1, as the library's functions receive them."""
    return 1.0 - config["clip_low_threshold"], config["clip_high_threshold"] - 1.0


_POLICY = ("logprobs", "advantages")
_LOSSES: Mapping[str, tuple[Callable[..., Tensor], Sequence[str], Mapping[str, float]]] = {
    "cross_entropy": (_cross_entropy, ("weights",), {}),
    "importance_sampling": (_importance_sampling, _POLICY, {}),
    "ppo": (_ppo, _POLICY, _CLIP),
    "cispo": (_cispo, _POLICY, _CLIP),
    "gspo": (_gspo, (*_POLICY, "sequence_ratio_mask"), _CLIP),
    "dro": (_dro, _POLICY, {"beta": 0.05}),
}
_REFUSED = {
    "stable_reinforce": "stable_reinforce is not offered, since its formula is not published. Offered: "
    + ", ".join(_LOSSES),
    "custom": "custom losses run in the client here: call forward_backward_custom with a function",
}


def loss_of(name: str, config: Mapping[str, float | str], rows: Sequence[Row]) -> Loss:
    """Return the loss of a request, after checking its options and the inputs of each row. Raises `InvalidRequest`.

    Args:
        name: the request's `loss_fn`.
        config: the request's `loss_fn_config`.
        rows: the request's data.
    """
    if name not in _LOSSES:
        raise InvalidRequest(_REFUSED.get(name, f"the loss {name!r} is unknown. Known: {', '.join(_LOSSES)}"))
    function, inputs, defaults = _LOSSES[name]
    for key, value in config.items():
        if key not in defaults:
            known = f" Known: {', '.join(defaults)}" if defaults else " It has none"
            raise InvalidRequest(f"{name} does not have the option {key!r}.{known}")
        if isinstance(value, str):
            raise InvalidRequest(f"the option {key!r} of {name} is a number, not the text {value!r}")
    options = {**defaults, **{key: float(value) for key, value in config.items()}}
    if "clip_low_threshold" in options and not options["clip_low_threshold"] <= 1.0 <= options["clip_high_threshold"]:
        raise InvalidRequest("1 must be between clip_low_threshold and clip_high_threshold, which bound the ratio")
    for index, row in enumerate(rows):
        if missing := [each for each in inputs if each not in row.fields]:
            raise InvalidRequest(f"datum {index}: {name} needs {', '.join(missing)} in loss_fn_inputs")
        if extra := [each for each in row.fields if each not in ("target_tokens", *inputs)]:
            raise InvalidRequest(f"datum {index}: {name} does not read {', '.join(extra)}")
        if row.num_targets and name != "cross_entropy":
            raise InvalidRequest(f"datum {index}: {name} has one target per position, got {row.num_targets}")
        if name == "gspo" and ((row.fields["advantages"] != 0) & (row.fields["sequence_ratio_mask"] == 0)).any():
            raise InvalidRequest(f"datum {index}: advantages must be 0 where sequence_ratio_mask is 0")
    return Loss(name, options, function)


def inputs_of(name: str) -> Sequence[str]:
    """Return the names of the tensors that a known loss reads besides `target_tokens`."""
    return _LOSSES[name][1]
