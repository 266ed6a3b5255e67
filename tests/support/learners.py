"""The source of a small algorithm plugin, to which tests add errors."""

LEARNER = """
from dataclasses import replace
from rlhf_core import Component
from rlhf_core.algorithm import LossOutput, LossTerm, RolloutAlgorithm
from rlhf_core.config import Section
from rlhf_forward import masked_sum
from rlhf_forward import policy_forward

class Options(Section):
    "Learn from every answer."

class Fine(RolloutAlgorithm):
    roles = frozenset({"policy"})
    terms = {"policy": LossTerm("policy")}
    def __init__(self, config, context):
        pass
    def advantages(self, episode):
        return replace(episode, advantages=episode.action_mask.float())
    def counts(self, batch):
        return {"policy": float(batch.action_mask.sum())}
    def loss(self, models, batch):
        log_probs = policy_forward(models["policy"], batch, 1.0).log_probs
        return LossOutput({"policy": -masked_sum(log_probs * batch.advantages, batch.action_mask)})
"""
"""An algorithm `Fine` without options (`Options`) that learns from every answer."""
