"""`reward_model` of `PPOTrainer`: a neural model, a reward function, or the name of an installed reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.components import RewardContext
from rlhf_core.config import RewardPolicy
from rlhf_core.errors import UserInputError
from rlhf_core.functional.masking import mask_from_lengths, position_ids_of
from rlhf_core.plugins import load
from rlhf_core.rewards import RewardSpec, reward_spec
from rlhf_core.types import Rollout

_WHERE = "PPOTrainer.reward_model"
_NEURAL_TIMEOUT_SECONDS = 3600.0
"""Scoring with a model of this process: nothing to lose patience with, but a wait has a deadline."""


def seed_reward(reward: object, device: torch.device, *, offload: bool, seed: int) -> RewardSpec:
    """One reward under core's reward policy. Raises `UserInputError` on anything that cannot score."""
    if isinstance(reward, str):
        selected = load("rewards", reward)
        config = selected.component.config.model_validate({})
        return reward_spec(selected, config, RewardContext(device=str(device), seed=seed), RewardPolicy())
    if isinstance(reward, nn.Module):
        policy = RewardPolicy(timeout_seconds=_NEURAL_TIMEOUT_SECONDS)
        function = NeuralReward(reward, device, offload=offload)
        return RewardSpec(name="model", policy=policy, function=function, plugin=type(reward).__name__)
    if callable(reward):
        _check_options(reward)
        name = getattr(reward, "__name__", None) or type(reward).__name__
        return RewardSpec(name=name.strip("<>"), policy=RewardPolicy(), function=reward, plugin="reward_model")
    raise UserInputError(
        f"{type(reward).__name__} cannot score answers",
        where=_WHERE,
        hint="give a reward model, a function of rollouts, or the name of an installed reward (rlhf plugins list)",
    )


def _check_options(reward: Callable[..., Any]) -> None:
    parameters = inspect.signature(reward).parameters.values()
    open_ones = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if open_ones:
        raise UserInputError(
            f"the reward's option {open_ones[0]!r} has no value",
            where=_WHERE,
            hint=f"bind it: functools.partial(reward, {open_ones[0]}=…)",
        )


class NeuralReward:
    """Scores whole sequences with a model: prompt and response, padded on the right.

    A transformers sequence-classification model (one label), or any module whose forward takes `input_ids` and
    `attention_mask` and returns scores [B] or [B, 1], or values per token [B, S] (also as `.logits`). A score per
    position is read at the last real token, known from lengths: never from a token that equals the padding.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, offload: bool) -> None:
        self._model = model.eval().requires_grad_(False)
        self._device = device
        self._offload = offload and device.type != "cpu"
        if not self._offload:
            self._model.to(device)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        rows = [torch.tensor(rollout.prompt_ids + rollout.completion_ids) for rollout in rollouts]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = mask_from_lengths(lengths, ids.shape[1])
        self._model.to(self._device)
        with torch.no_grad():
            scores = self._scores(ids.to(self._device), mask.to(self._device))
            if scores.ndim == 2:
                scores = scores.gather(1, (lengths.to(scores.device) - 1).unsqueeze(1))
        return [float(score) for score in scores.reshape(len(rollouts)).float().cpu()]

    def release(self) -> None:
        """Leave the device to training; the next call comes back to it."""
        if self._offload:
            self._model.to("cpu")

    def _scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B], or [B, S] with a score per position."""
        model: Any = self._model
        if hasattr(model, "score") and hasattr(model, "base_model"):
            # transformers' own pooling looks for the last token that is not the pad token, which may be EOS.
            positions = {"position_ids": position_ids_of(mask)} if _takes(model.base_model, "position_ids") else {}
            output = model.base_model(input_ids=ids, attention_mask=mask.long(), **positions)
            return _one_number(model.score(output.last_hidden_state))
        output = model(input_ids=ids, attention_mask=mask.long())
        found = getattr(output, "logits", output)
        if not isinstance(found, Tensor):
            raise TypeError(f"the reward model returned {type(output).__name__}, not a tensor of scores")
        return _one_number(found)


def _one_number(scores: Tensor) -> Tensor:
    """[B, 1] -> [B], [B, S, 1] -> [B, S]."""
    if scores.ndim > 1 and scores.shape[-1] == 1:
        scores = scores.squeeze(-1)
    if scores.ndim > 2:
        raise ValueError(f"a reward model gives one score, this one has {scores.shape[-1]} labels")
    return scores


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
