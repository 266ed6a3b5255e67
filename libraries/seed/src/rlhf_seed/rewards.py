"""Convert `reward_model` of ColossalChat's classes (a neural model, a function, or a reward's name) to a core reward.

A callable with a parameter `input_ids`, such as ColossalChat's `RLVRRewardModel`, is called as ColossalChat calls it.
Any other callable receives rollouts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.components import RewardContext
from rlhf_core.config.sections import RewardCallOptions
from rlhf_core.errors import UserInputError
from rlhf_core.plugins.selected import load
from rlhf_core.rewards.scorer import RewardSpec, make_reward_spec
from rlhf_forward import last_token_scores
from rlhf_models import disable_dropout, is_lora

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rlhf_core.types import Rollout

_NEURAL_TIMEOUT_SECONDS = 3600.0
"""Deadline for scoring with a model in this process. It is long because no network can stall."""

_TOKEN_ARGUMENTS = ("input_ids", "attention_mask", "response_start", "response_end", "gt_answer")

_FORMS = (
    "pass a reward model, a function f(rollouts) -> scores, a callable of input_ids, attention_mask, response_start,"
    " response_end and gt_answer (such as RLVRRewardModel), or the name of an installed reward (rlhf plugins list)"
)

_BATCH_TOKENS = 16384
"""Maximum tokens scored at once, including padding."""


def seed_reward(reward: object, device: torch.device, *, offload: bool, seed: int, where: str) -> RewardSpec:
    """Convert ColossalChat's `reward_model` to a reward of core.

    Args:
        reward: Neural model, function of rollouts, callable of token batches, or name of an installed reward.
        device: Device of the model's forward passes.
        offload: Keep a neural model on the device only while it scores (see `NeuralReward.release`).
        seed: Random seed passed to an installed reward.
        where: Name of the parameter in error messages.

    Returns:
        The reward with its call options. A neural model has a timeout of one hour per call.

    Raises:
        UserInputError: The object cannot score answers.
    """
    from torch import nn

    if isinstance(reward, str):
        selected = load("rewards", reward)
        config = selected.component.config.model_validate({})
        return make_reward_spec(selected, config, RewardContext(str(device), seed), RewardCallOptions())
    if isinstance(reward, nn.Module):
        options = RewardCallOptions(timeout_seconds=_NEURAL_TIMEOUT_SECONDS)
        function = NeuralReward(reward, device, offload=offload, where=where)
        return RewardSpec(name="model", call_options=options, function=function, plugin=type(reward).__name__)
    if callable(reward):
        name = getattr(reward, "__name__", None) or type(reward).__name__
        scores = _as_function(reward, device, where)
        return RewardSpec(
            name=name.strip("<>"), call_options=RewardCallOptions(), function=scores, plugin="reward_model"
        )
    raise UserInputError(f"reward model of type {type(reward).__name__} cannot score", where=where, hint=_FORMS)


def _as_function(reward: Callable[..., Any], device: torch.device, where: str) -> Callable[..., Any]:
    """Adapt the callable to `f(rollouts)` by its signature. Raise `UserInputError` if it matches neither form."""
    try:
        signature = inspect.signature(reward)
    except ValueError:  # the signature of some C callables is unknown
        return reward
    takes_tokens = "input_ids" in signature.parameters
    arguments = dict.fromkeys(_token_arguments(signature)) if takes_tokens else {}
    unbound = [
        p.name
        for p in signature.parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in arguments
    ]
    if unbound:
        raise UserInputError(
            f"the reward's option {unbound[0]!r} is required but unset",
            where=where,
            hint=f"bind it: functools.partial(reward, {unbound[0]}=…)",
        )
    try:
        signature.bind(**arguments) if takes_tokens else signature.bind(())
    except TypeError as error:
        raise UserInputError(f"the reward cannot be called: {error}", where=where, hint=_FORMS) from None
    return TokenReward(reward, device) if takes_tokens else reward


def _token_arguments(signature: inspect.Signature) -> tuple[str, ...]:
    """ColossalChat's arguments that the callable accepts."""
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in _TOKEN_ARGUMENTS if takes_all or name in parameters)


class TokenReward:
    """Adapts a callable that scores token batches, such as ColossalChat's `RLVRRewardModel`, to `f(rollouts)`.

    The callable receives, by keyword, those of the following arguments that it declares:

    - `input_ids` [B, S] int64: prompt and response, right-padded with 0
    - `attention_mask` [B, S] bool: True for real tokens
    - `response_start`, `response_end`: lists of B positions in a row, the end exclusive and after EOS
    - `gt_answer`: list of B answers

    It returns scores [B] or [B, 1].
    """

    def __init__(self, reward: Callable[..., Any], device: torch.device) -> None:
        self._reward = reward
        self._device = device
        self._arguments = _token_arguments(inspect.signature(reward))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return one score per answer."""
        import torch

        from rlhf_forward.masking import mask_from_lengths

        rows = [torch.tensor(rollout.prompt_ids + rollout.completion_ids) for rollout in rollouts]
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask_from_lengths(lengths, ids.shape[1]),
            "response_start": [len(rollout.prompt_ids) for rollout in rollouts],
            "response_end": lengths.tolist(),
            "gt_answer": [rollout.answer for rollout in rollouts],
        }
        with torch.no_grad():
            scores = torch.as_tensor(self._reward(**{name: arguments[name] for name in self._arguments}))
        result: list[float] = _one_number(scores).float().cpu().tolist()
        return result


class NeuralReward:
    """Score whole sequences, prompt and response, with a model: one number at the last real token.

    The last real token is found from the sequence length, never by comparison with the padding token.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, offload: bool, where: str) -> None:
        """Freeze the model, turn its dropout off, and move it to the device unless it is offloaded.

        Args:
            model: Transformers sequence-classification model with one label, or a module whose forward takes
                `input_ids` and `attention_mask` ([B, S] int64) and returns scores [B] or [B, 1], or values per
                token [B, S], also as `.logits`.
            device: Device of the forward passes.
            offload: Keep the model on the device only while it scores.
            where: Name of the parameter in error messages.

        Raises:
            UserInputError: A sequence-classification model has several labels.
        """
        config: Any = getattr(model, "config", None)
        classifies = type(_without_adapter(model)).__name__.endswith("ForSequenceClassification")
        if classifies and getattr(config, "num_labels", 1) != 1:
            raise UserInputError(
                f"the reward model has {config.num_labels} labels", where=where, hint="load it with num_labels=1"
            )
        disable_dropout(model)
        self._model = model.eval().requires_grad_(False)
        self._device = device
        self._offload = offload and device.type != "cpu"
        if not self._offload:
            self._model.to(device)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return one score per answer."""
        import torch

        rows = [rollout.prompt_ids + rollout.completion_ids for rollout in rollouts]
        scores = [0.0] * len(rows)
        self._model.to(self._device)
        inner: Any = _without_adapter(self._model)
        has_trunk = hasattr(inner, "score") and hasattr(inner, "base_model")
        with torch.no_grad():
            for indices in _batches([len(row) for row in rows], padded=has_trunk):
                batch = [torch.tensor(rows[index]) for index in indices]
                output = _score_with_trunk(inner, batch, self._device) if has_trunk else self._score(batch)
                for index, score in zip(indices, output.float().cpu().tolist(), strict=True):
                    scores[index] = score
        return scores

    def release(self) -> None:
        """Move an offloaded model to the CPU to free the device for training. The next call moves it back."""
        if self._offload:
            self._model.to("cpu")

    def _score(self, rows: Sequence[Tensor]) -> Tensor:
        """Scores [B] of rows of equal length."""
        import torch

        from rlhf_forward.row_lengths import own_lengths

        ids = torch.stack(list(rows)).to(self._device)
        with own_lengths(self._model, torch.full_like(ids, ids.shape[1])):
            output = self._model(input_ids=ids, attention_mask=torch.ones_like(ids))
        values = getattr(output, "logits", output)
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"the reward model returned {type(output).__name__}, not a tensor of scores")
        scores = _one_number(values)
        if scores.ndim == 2 and scores.shape[1] != ids.shape[1]:
            raise ValueError(f"a reward model must return one score, this one has {scores.shape[1]} labels")
        return scores[:, -1] if scores.ndim == 2 else scores.reshape(len(rows))


def _score_with_trunk(model: Any, rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scores [B] of a transformers classifier. Raise `ValueError` if it has several labels."""
    by_position = last_token_scores(model, rows, device).unsqueeze(1)
    return _one_number(by_position).squeeze(1)


def _batches(lengths: Sequence[int], *, padded: bool) -> list[list[int]]:
    """Split rows into batches, as lists of indices.

    A module that locates the score itself may use the first token, the last, or the last that is not padding.
    `padded=False` batches only rows of equal length, for which all three are correct.
    """
    from rlhf_core.batching import plan_micro_batches

    if padded:
        return plan_micro_batches(lengths, _BATCH_TOKENS)
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length, []).append(index)
    return [
        [indices[place] for place in plan]
        for length, indices in groups.items()
        for plan in plan_micro_batches([length] * len(indices), _BATCH_TOKENS)
    ]


def _one_number(scores: Tensor) -> Tensor:
    """Drop a last dimension of size 1: [B, 1] -> [B], [B, S, 1] -> [B, S]."""
    if scores.ndim > 1 and scores.shape[-1] == 1:
        scores = scores.squeeze(-1)
    if scores.ndim > 2:
        raise ValueError(f"a reward model must return one score, this one has {scores.shape[-1]} labels")
    return scores


def _without_adapter(model: nn.Module) -> nn.Module:
    """The base model of a LoRA model, or the model itself."""
    adapted: Any = model
    inner: nn.Module = adapted.get_base_model() if is_lora(model) else model
    return inner
