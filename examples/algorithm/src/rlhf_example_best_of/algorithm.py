"""The update: cross-entropy on the best answers."""

from dataclasses import replace

import torch

from rlhf_core.algorithm import LossOutput, LossTerm, RolloutAlgorithm
from rlhf_forward import masked_sum, policy_forward


class BestOf(RolloutAlgorithm):
    """Every token of a best answer has advantage 1. Other answers are masked."""

    roles = frozenset({"policy"})
    terms = {"policy": LossTerm("policy")}  # noqa: RUF012 - core only reads it

    def __init__(self, config, context):
        self._min_score = config.min_score
        self._temperature = context.sampling.temperature

    def advantages(self, episode):
        best = torch.zeros(len(episode), dtype=torch.bool)
        for group in episode.group_ids.unique():
            rows = (episode.group_ids == group).nonzero().squeeze(-1)
            best[rows[episode.scores[rows].argmax()]] = True
        if self._min_score is not None:
            best &= episode.scores >= self._min_score
        mask = episode.action_mask & best[:, None]
        changed = replace(episode, action_mask=mask, advantages=mask.float())
        return replace(changed, metrics={"best_of/kept_fraction": float(best.float().mean())})

    def counts(self, batch):
        return {"policy": float(batch.action_mask.sum())}

    def loss(self, models, batch):
        log_probs = policy_forward(models["policy"], batch, self._temperature).log_probs
        return LossOutput({"policy": -masked_sum(log_probs, batch.action_mask)}, log_probs=log_probs.detach())
