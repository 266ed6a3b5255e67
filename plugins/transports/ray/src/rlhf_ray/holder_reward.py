"""A reward of whichever kind a `model_fn` returns, as the function core scores with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhf_core.batching import plan_micro_batches
from rlhf_core.errors import UserInputError
from rlhf_core.functional.masking import position_ids_of
from rlhf_core.models import disable_dropout

if TYPE_CHECKING:
    from rlhf_core.types import Rollout

_BATCH_TOKENS = 16384


def as_reward(reward: object, device: torch.device) -> Callable[..., Any]:
    """The reward itself where it is a function; a model is wrapped in a `ModelReward`. Raises `UserInputError`."""
    if isinstance(reward, nn.Module):
        return ModelReward(reward, device)
    if callable(reward):
        return reward
    raise UserInputError(
        f"the reward model is a {type(reward).__name__}",
        where="model_fn",
        hint="return a function f(rollouts) -> scores, or a transformers sequence-classification model",
    )


class ModelReward:
    """A sequence-classification model with one label: the score at the last real token of prompt and answer.

    Any module does whose forward(input_ids, attention_mask) gives [B] or [B, 1], as a tensor or as `logits`, and reads
    it at the last position: rows are padded on the left, so that is the last real token, whichever token pads.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        config = getattr(model, "config", None)
        if getattr(config, "num_labels", 1) != 1:
            raise UserInputError(
                f"the reward model has {config.num_labels} labels",  # type: ignore[union-attr]
                where="model_fn",
                hint="load it with num_labels=1",
            )
        if config is not None and hasattr(config, "pad_token_id"):
            # transformers would look for the last token that is no padding, and take an EOS that pads for padding.
            config.pad_token_id = -1
        disable_dropout(model)
        self._model = model.to(device).eval().requires_grad_(False)
        self._device = device
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One score an answer."""
        rows = [rollout.prompt_ids + rollout.completion_ids for rollout in rollouts]
        scores = [0.0] * len(rows)
        for plan in plan_micro_batches([len(row) for row in rows], _BATCH_TOKENS):
            for index, score in zip(plan, self._score([rows[i] for i in plan]), strict=True):
                scores[index] = score
        return scores

    def _score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for place, row in enumerate(rows):
            ids[place, width - len(row) :] = torch.tensor(row)
            mask[place, width - len(row) :] = True
        ids, mask = ids.to(self._device), mask.to(self._device)
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if self._takes_positions:
            inputs["position_ids"] = position_ids_of(mask)
        with torch.no_grad():
            output = self._model(**inputs)
        scores = getattr(output, "logits", output)
        return [float(score) for score in scores.float().reshape(len(rows)).cpu()]
