"""The whole episode as seen by a rank that holds some of its rows: one number per row, and sums over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from .types import Experience


def single_rank(tensor: Tensor, op: Literal["sum", "max"] = "sum", /) -> Tensor:
    """`Place.all_reduce` of one rank."""
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """The episode that a rank's R rows are part of: numbers of all its B rows, and sums over those of all ranks.

    All rows are in the order of sample and branch; their numbers are the same on every rank.
    """

    sample_ids: Tensor
    """[B] int64."""
    group_ids: Tensor
    """[B] int64."""
    scores: Tensor
    """[B] float32, the combined reward of the row's sample; for estimators by name less the penalty of long answers."""
    lengths: Tensor
    """[B] int64, sampled tokens that count in the loss."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B] float32, raw. Set for estimators by name: also what the algorithm takes off the scores (under
    `LENGTH_PENALTY` and `KL_PENALTY` of `rlhf_objective`), so that the weighted sum is `totals` where scores are
    neither clipped nor normalised."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """name -> factor of that reward in the score; 1 for a name that is absent."""
    greedy_scores: Tensor | None = None
    """[B] float32, the combined reward of the greedy answer to the row's prompt; None where none was made."""
    branches: Tensor | None = None
    """[B] int64; None where every episode is one row."""
    kl: Tensor | None = None
    """[B] float64 nats, the sum over the row's tokens; set by the algorithm where it has a reference."""
    totals: Tensor | None = None
    """[B] float32, the score less the penalised KL of all rows of the sample; set for estimators by name."""
    rows: Tensor | None = None
    """[R] int64, the place of each row here among all, -1 for a masked filler; None where all rows are here."""
    all_reduce: Callable[..., Tensor] = single_rank
    """`Place.all_reduce`: sums, or with "max" maxima, over all ranks. Collective."""

    @classmethod
    def of(cls, rows: Experience) -> EpisodeView:
        """The episode that `rows` are part of, or these rows as all there are; needs `scores`."""
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
        """[B] int64 `sample_ids`; None where every row is a separate sample."""
        return None if self.branches is None else self.sample_ids

    @property
    def num_samples(self) -> int:
        """Rows, or fewer where an episode has several."""
        return int(self.sample_ids.numel() if self.branches is None else self.sample_ids.unique().numel())

    def local(self, values: Tensor) -> Tensor:
        """[B] values of all rows -> [R] those of the rows here, 0 for a filler."""
        import torch

        return values if self.rows is None else torch.cat([values, values.new_zeros(1)])[self.rows]

    def gather(self, values: Tensor) -> Tensor:
        """[R] values of the rows here -> [B] float64 values of all rows. Collective."""
        import torch

        if self.rows is None:
            return self.all_reduce(values.double())
        placed = torch.zeros(self.sample_ids.numel() + 1, dtype=torch.float64, device=values.device)
        placed[self.rows] = values.double()  # a filler's value falls behind the end
        return self.all_reduce(placed[:-1])
