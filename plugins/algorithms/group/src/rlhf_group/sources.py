"""Sources of loss other than the policy gradient: selected answers, pairs of answers to one prompt, texts of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core import Column, Columns
from rlhf_core.algorithm import LossTerm, Mean
from rlhf_core.batching import collate, split, to_device
from rlhf_core.episode_view import EpisodeView
from rlhf_core.types import BufferItem, Experience
from rlhf_forward import masked_sum
from rlhf_objective import ImitationConfig, PreferenceConfig, RecordsConfig, TextFile, dpo_loss, sum_of_pairs

IMITATED = "imitated"
"""Column: True if the cross-entropy of the answer is part of the loss."""
PREFERRED = "preferred"
"""Column: 1 for the chosen answer of a pair, -1 for the rejected one, 0 for all others."""
COLUMNS: Mapping[str, Column] = {
    IMITATED: Column(per="sample", dtype="bool"),
    PREFERRED: Column(per="sample", dtype="int8"),
}


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources that an algorithm's options set, and the texts of `records`."""

    imitation: ImitationConfig | None = None
    preference: PreferenceConfig | None = None
    records: RecordsConfig | None = None
    texts: TextFile | None = None

    def __bool__(self) -> bool:
        return not (self.imitation is None and self.preference is None and self.records is None)

    @property
    def terms(self) -> dict[str, LossTerm]:
        """Loss term of each source that is set."""
        sources = {"imitation": self.imitation, "preference": self.preference, "records": self.records}
        return {name: LossTerm("policy", each.coef) for name, each in sources.items() if each is not None}

    def marked(self, rows: Experience, view: EpisodeView, metrics: dict[str, float]) -> Experience:
        """Return the rows with the marks of selected answers and pairs. Adds fractions of the episode to `metrics`."""
        answers, values = ranked(view), dict[str, Tensor]()
        if self.imitation is not None:
            imitated = best_answers(view, answers, self.imitation)
            num_selected = len(set(view.sample_ids[imitated].tolist()))
            metrics["imitation/selected_fraction"] = num_selected / view.num_samples
            values[IMITATED] = view.local(imitated)
        if self.preference is not None:
            preferred = pairs_of_groups(view, answers, self.preference.min_gap)
            num_pairs = len(set(view.sample_ids[preferred > 0].tolist()))
            metrics["preference/pairs_fraction"] = num_pairs / len(answers)
            values[PREFERRED] = view.local(preferred)
        return replace(rows, columns=rows.columns | Columns(values, COLUMNS))

    def selected(self, batch: Experience) -> tuple[list[int], Experience]:
        """Return the indices of a batch's rows that have a mark, and these rows. If none has, a masked row."""
        marks = _answered(batch) & (batch.columns[IMITATED] if self.imitation is not None else False)
        if self.preference is not None:
            marks = marks | (_answered(batch) & (batch.columns[PREFERRED] != 0))
        chosen: list[int] = marks.nonzero().flatten().tolist()
        if chosen:
            return chosen, rows_at(batch, chosen)
        first = rows_at(batch, [0])  # the forward pass of this micro-batch, of which nothing counts
        return [], replace(first, action_mask=torch.zeros_like(first.action_mask))

    def with_texts(self, batch: Experience, items: Sequence[BufferItem]) -> Experience:
        """Return the batch with a text of `records` for each item."""
        return batch if self.texts is None else self.texts.attach(batch, items)

    def imitation_mask(self, batch: Experience) -> Tensor:
        """[B, A] bool, True for the tokens of selected answers."""
        imitated: Tensor = batch.columns[IMITATED]
        return batch.action_mask & imitated.unsqueeze(-1)

    def num_pairs(self, batch: Experience) -> float:
        """Number of pairs in the batch."""
        return float(_pairs(batch, torch.zeros_like(batch.action_log_probs), per_token=False).counts.sum())

    def preference_sum(self, batch: Experience, log_probs: Tensor) -> tuple[Tensor, dict[str, Mean]]:
        """Return the sum of the pairs' losses (scalar), and metrics.

        Args:
            batch: Whole groups, with marks and reference log-probs.
            log_probs: [B, A] nats, of the policy, with gradient.
        """
        assert self.preference is not None and batch.reference_log_probs is not None
        kind, beta = self.preference.loss, self.preference.beta
        pairs = _pairs(batch, log_probs - batch.reference_log_probs, per_token=kind == "ipo")
        return sum_of_pairs(dpo_loss(pairs.chosen, pairs.rejected, beta=beta, kind=kind), pairs.counts)


Answers = list[list[list[int]]]
"""For each prompt, for each answer from the highest to the lowest score, the indices of its rows."""


def ranked(view: EpisodeView) -> Answers:
    """Return the answers to each prompt in order of their scores. The earlier of two equal ones comes first."""
    groups: dict[int, dict[int, list[int]]] = {}
    for row, (group, sample) in enumerate(zip(view.group_ids.tolist(), view.sample_ids.tolist(), strict=True)):
        groups.setdefault(group, {}).setdefault(sample, []).append(row)
    scores = view.scores.tolist()
    return [sorted(samples.values(), key=lambda rows: -scores[rows[0]]) for samples in groups.values()]


def best_answers(view: EpisodeView, answers: Answers, options: ImitationConfig) -> Tensor:
    """Return [B] bool, True for the rows of the answers to imitate."""
    scores, chosen = view.scores.tolist(), torch.zeros(len(view.scores), dtype=torch.bool)
    for best_first in answers:
        worst = scores[best_first[-1][0]]
        for rows in best_first[: options.best]:
            score = scores[rows[0]]
            chosen[rows] = score > worst if options.min_score is None else score >= options.min_score
    return chosen


def pairs_of_groups(view: EpisodeView, answers: Answers, min_gap: float) -> Tensor:
    """Return [B] int8: 1 for the rows of a prompt's best answer, -1 for its worst, if their scores differ enough."""
    marks = torch.zeros(len(view.scores), dtype=torch.int8)
    for best_first in answers:
        best, worst = best_first[0], best_first[-1]
        gap = float(view.scores[best[0]] - view.scores[worst[0]])
        if gap > 0 and gap >= min_gap:
            marks[best], marks[worst] = 1, -1
    return marks


@dataclass(frozen=True, slots=True)
class _Pairs:
    chosen: Tensor
    """[G] values of the chosen answers, 0 without one."""
    rejected: Tensor
    """[G] values of the rejected answers."""
    counts: Tensor
    """[G] bool, whether the batch has both answers."""


def rows_at(batch: Experience, places: Sequence[int]) -> Experience:
    """Return a batch of some rows, padded to the longest of them."""
    items = split(batch, to_cpu=False)
    return to_device(collate([items[place] for place in places]), batch.sequences.device)


def _answered(batch: Experience) -> Tensor:
    """[B] bool, True unless all tokens of the row are masked, as in a filler."""
    return batch.action_mask.any(-1)


def _pairs(batch: Experience, values: Tensor, *, per_token: bool) -> _Pairs:
    """Return the sums (or means) of [B, A] values over the tokens of both answers of each of the batch's G groups."""
    groups, index = batch.group_ids.unique(return_inverse=True)
    sums, lengths = masked_sum(values, batch.action_mask, -1), batch.action_mask.sum(-1)
    sides = []
    for sign in (1, -1):
        is_side = (batch.columns[PREFERRED] == sign) & _answered(batch)
        count = torch.zeros(len(groups), dtype=lengths.dtype, device=lengths.device)
        count = count.index_add(0, index, torch.where(is_side, lengths, 0))
        total = torch.zeros(len(groups), dtype=sums.dtype, device=sums.device)
        total = total.index_add(0, index, torch.where(is_side, sums, 0.0))
        sides.append((total / count.clamp(min=1) if per_token else total, count > 0))
    (chosen, has_chosen), (rejected, has_rejected) = sides
    return _Pairs(chosen, rejected, has_chosen & has_rejected)
