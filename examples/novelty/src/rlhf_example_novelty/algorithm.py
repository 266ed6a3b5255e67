"""The algorithm: its own model as a role, its pass, and a loss that reads the pass's column."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from rlhf_core import Experience, LossOutput, LossTerm, RolloutAlgorithm
from rlhf_core.algorithm import FrozenModel, GroupPass, Mean, PassContext
from rlhf_core.components import AlgorithmContext
from rlhf_forward import masked_mean, masked_sum, policy_forward

from .config import NovelConfig
from .witness import NOVELTY, WitnessPass


class Novel(RolloutAlgorithm):
    """REINFORCE that weights each token by 1 + bonus * min(novelty / goal, 1)."""

    roles = frozenset({"policy", "witness"})
    terms = {"policy": LossTerm("policy")}  # noqa: RUF012 - core only reads it

    def __init__(self, config: NovelConfig, context: AlgorithmContext) -> None:
        self.config = config
        self.temperature = context.sampling.temperature

    @property
    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """The witness, which core loads, places, offloads and counts in plans."""
        witness = self.config.witness
        return {"witness": FrozenModel(witness.path, offload=witness.offload)}

    def passes(self, context: PassContext) -> Sequence[GroupPass]:
        return [WitnessPass(context)]

    def advantages(self, episode: Experience) -> Experience:
        """Compute the advantages of the whole episode, on every rank."""
        mask = episode.action_mask
        advantages = mask * (episode.scores - episode.scores.mean())[:, None]
        metrics = {"novelty/mean": float(masked_mean(episode.columns[NOVELTY], mask))}
        if "draws" in episode.columns:  # in a run with the section `novelty`, whose player adds it
            metrics["novelty/draws"] = float(episode.columns["draws"].float().mean())
        return replace(episode, advantages=advantages, metrics=metrics)

    def counts(self, batch: Experience) -> Mapping[str, float]:
        return {"policy": float(batch.action_mask.sum())}

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        mask, log_probs = batch.action_mask, policy_forward(models["policy"], batch, self.temperature).log_probs
        weights = self.weights(batch.columns[NOVELTY])
        sums = {"policy": -masked_sum(weights * batch.advantages * log_probs, mask)}
        metrics = {"novelty/weight": Mean(masked_sum(weights, mask), mask.sum())}
        return LossOutput(sums, metrics, log_probs.detach())

    def weights(self, novelty: Tensor) -> Tensor:
        """Return the weight of each token, [B, A], from its novelty, [B, A] in nats."""
        return 1.0 + self.config.bonus * (novelty / self.config.goal).clamp(max=1.0)
