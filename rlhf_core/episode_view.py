"""View of a whole episode for a rank that holds some of its rows: one number per row, and sums over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from .types import Experience


def single_rank(tensor: Tensor, op: Literal["sum", "max"] = "sum", /) -> Tensor:
    """`Place.all_reduce` for a single rank: return the tensor unchanged."""
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """The episode that a rank's R rows belong to: per-row numbers of all B rows, and reductions over all ranks.

    The B rows are sorted by sample and branch. Their numbers are the same on every rank.

    Example:
        >>> import torch
        >>> ids, scores = torch.tensor([0, 1]), torch.tensor([1.0, 0.5])
        >>> view = EpisodeView(sample_ids=ids, group_ids=ids, scores=scores, lengths=ids, rows=torch.tensor([1]))
        >>> view.local(scores)  # this rank holds row 1 of 2
        tensor([0.5000])
        >>> view.gather(torch.tensor([7.0]))  # sums over ranks, here only this one
        tensor([0., 7.], dtype=torch.float64)
    """

    sample_ids: Tensor
    """[B] int64."""
    group_ids: Tensor
    """[B] int64."""
    scores: Tensor
    """[B] float32, the combined reward of the row's sample. For named estimators, minus the penalty of long answers."""
    lengths: Tensor
    """[B] int64, number of sampled tokens that count in the loss."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B] float32, raw. For named estimators also the penalties that the algorithm adds to the scores (under
    `LENGTH_PENALTY` and `KL_PENALTY` of `rlhf_objective`), so that the weighted sum equals `totals` if scores are
    neither clipped nor normalized."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """name -> factor of that reward in the score. 1 for a name that is absent."""
    greedy_scores: Tensor | None = None
    """[B] float32, the combined reward of the greedy answer to the row's prompt. None if greedy answers are off."""
    branches: Tensor | None = None
    """[B] int64. None if every episode is one row."""
    kl: Tensor | None = None
    """[B] float64 nats, summed over the row's tokens. Set by the algorithm if it has a reference."""
    totals: Tensor | None = None
    """[B] float32, the score minus the KL penalty of all rows of the sample. Set for named estimators."""
    rows: Tensor | None = None
    """[R] int64, index of each local row among all rows, -1 for a masked filler. None if this rank holds all rows."""
    all_reduce: Callable[..., Tensor] = single_rank
    """`Place.all_reduce`: sums (or, with "max", maxima) over all ranks. Collective."""

    @classmethod
    def of(cls, rows: Experience) -> EpisodeView:
        """Return the view stored in `rows`, or a view of these rows as the whole episode, which needs `scores`."""
        if rows.view is not None:
            return rows.view
        assert rows.scores is not None
        return cls(
            sample_ids=rows.sample_ids,
            group_ids=rows.group_ids,
            scores=rows.scores,
            lengths=rows.action_mask.sum(-1),
            rewards=rows.rewards,
            branches=rows.branches,
        )

    @property
    def row_sample_ids(self) -> Tensor | None:
        """[B] int64 `sample_ids`, or None if every row is a separate sample."""
        return None if self.branches is None else self.sample_ids

    @property
    def num_samples(self) -> int:
        """Number of samples: B, or fewer if some samples have several rows."""
        return int(self.sample_ids.numel() if self.branches is None else self.sample_ids.unique().numel())

    def local(self, values: Tensor) -> Tensor:
        """[B] values of all rows -> [R] values of the local rows, 0 for a filler."""
        import torch

        return values if self.rows is None else torch.cat([values, values.new_zeros(1)])[self.rows]

    def gather(self, values: Tensor) -> Tensor:
        """[R] values of the local rows -> [B] float64 values of all rows. Collective."""
        import torch

        if self.rows is None:
            return self.all_reduce(values.double())
        placed = torch.zeros(self.sample_ids.numel() + 1, dtype=torch.float64, device=values.device)
        placed[self.rows] = values.double()  # a filler's index, -1, is the extra last element
        return self.all_reduce(placed[:-1])
