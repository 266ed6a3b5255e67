"""The common algorithm of the family: a selected advantage estimator and policy loss, a KL penalty, and no critic.

Other sources of loss (`sources.py`) may be added to the policy loss, or replace it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rlhf_core import Column
from rlhf_core.algorithm import LossOutput, LossTerm
from rlhf_core.components import AlgorithmContext
from rlhf_core.episode_view import EpisodeView
from rlhf_core.errors import ConfigError
from rlhf_core.types import BufferItem, Experience, Role, RolloutGroup
from rlhf_forward import aggregate_count
from rlhf_objective import PolicyObjective, TextFile, check_groups, group_spread, text_count, text_loss

from .config import CriticFreeConfig
from .sources import COLUMNS, Sources


def build(config: CriticFreeConfig, context: AlgorithmContext) -> CriticFree:
    """Build the algorithm. Raise `ConfigError` if it compares groups and `samples_per_prompt` is 1."""
    algorithm = CriticFree(config, context)
    check_groups(config.algorithm, algorithm.estimator, context.samples_per_prompt)
    if config.preference is not None and context.samples_per_prompt < 2:
        raise ConfigError(
            "is 1, but a preference pair needs two answers to a prompt",
            where="train.samples_per_prompt",
            hint="set train.samples_per_prompt to 2 or more",
        )
    return algorithm


class CriticFree(PolicyObjective):
    """Learns from sampled answers, with a baseline computed from the episode itself."""

    config: CriticFreeConfig
    columns: Mapping[str, Column] = {**PolicyObjective.columns, **COLUMNS}

    def __init__(self, config: CriticFreeConfig, context: AlgorithmContext) -> None:
        if config.dynamic_sampling and context.samples_per_prompt < 2:
            raise ConfigError(
                "rejects every group whose scores are all equal, as in a group of one answer: no batch would ever fill",
                where="algorithm.dynamic_sampling",
                hint="set train.samples_per_prompt to 4 or more, or dynamic_sampling to false",
            )
        sampling = context.sampling
        super().__init__(config, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)
        self._score = context.score
        records, texts = config.records, None
        if records is not None:
            option = "algorithm.records.path"
            texts = TextFile(records.path, context.tokenizer, records.max_tokens, option=option)
        self._sources = Sources(config.imitation, config.preference, records, texts)

    @property
    def roles(self) -> frozenset[Role]:
        return super().roles | ({"reference"} if self.config.preference is not None else set())

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        return {**self.policy_terms(), **self._sources.terms}

    def policy_terms(self, share: float = 1.0) -> dict[str, LossTerm]:
        """Return the terms of the policy objective, without `policy` if `policy_coef` is 0."""
        terms, coefficient = super().policy_terms(share), self.config.policy_coef
        policy = terms.pop("policy")
        return {"policy": LossTerm("policy", policy.coefficient * coefficient), **terms} if coefficient > 0 else terms

    def units(self, items: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Keep the answers to a prompt together if they are compared in the loss."""
        if self.config.preference is None:
            return super().units(items)
        groups: dict[int, list[Any]] = {}
        for item in items:
            groups.setdefault(item.group_id, []).append(item)
        return list(groups.values())

    def collate(self, items: Sequence[BufferItem]) -> Experience:
        return self._sources.with_texts(super().collate(items), items)

    def counts(self, batch: Experience) -> Mapping[str, float]:
        counts, sources = dict(super().counts(batch)), self._sources
        if sources.imitation is not None:
            counts["imitation"] = aggregate_count(sources.imitation_mask(batch), self.config.aggregation)
        if sources.preference is not None:
            counts["preference"] = sources.num_pairs(batch)
        if sources.records is not None:
            counts["records"] = text_count(batch)
        return counts

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        """Sum all sources. Without terms of all answers, only the answers with a mark are computed."""
        sources = self._sources
        if not sources:
            return super().loss(models, batch)
        policy = models["policy"]
        places, rows = (None, batch) if self.policy_terms() else sources.selected(batch)
        terms = self.terms_of(policy, rows)
        log_probs, metrics = terms.output.log_probs, dict(terms.metrics)
        sums = {name: each for name, each in terms.sums.items() if name in self.terms}
        if sources.imitation is not None:
            sums["imitation"] = self._sum(-log_probs, sources.imitation_mask(rows))
        if sources.preference is not None:
            sums["preference"], of_pairs = sources.preference_sum(rows, log_probs)
            metrics |= of_pairs
        if sources.records is not None:
            sums["records"] = text_loss(policy, batch)
        measured = log_probs.detach()
        if places is not None:  # of other answers, only the engine's log-probs are known
            of_all = batch.action_log_probs.clone()
            if places:
                of_all[places, : measured.shape[1]] = measured
            measured = of_all
        return LossOutput(sums, metrics, measured)

    def keep(self, group: RolloutGroup) -> bool:
        """With dynamic sampling, keep only groups whose samples differ in score, ignoring length penalties."""
        if not self.config.dynamic_sampling:
            return True
        return len({self._score(item.rewards) for item in group.items}) > 1

    def estimate(
        self, episode: Experience, view: EpisodeView, rewards: Tensor, kl: Tensor | None, metrics: dict[str, float]
    ) -> Experience:
        spread = group_spread(view.scores, view.group_ids, view.row_sample_ids)
        metrics["group/std_mean"] = spread.std_mean
        metrics["group/without_spread_fraction"] = spread.without_spread_fraction
        estimated = super().estimate(episode, view, rewards, kl, metrics)
        return self._sources.marked(estimated, view, metrics) if self._sources else estimated
