"""Combines raw rewards by name into one score per sample; computed by the trainer over a whole episode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RewardError

if TYPE_CHECKING:
    from torch import Tensor

_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Combined:
    """The scores of an episode, and metrics on how they were combined."""

    scores: Tensor
    """[B] float32."""
    metrics: dict[str, float]


def combined_score(weights: Mapping[str, float], clip: tuple[float, float] | None, raw: Mapping[str, float]) -> float:
    """The score of one sample before normalisation, in float64, as `RewardCombiner` computes it."""
    total = math.fsum(weight * raw[name] for name, weight in weights.items())
    return total if clip is None else min(max(total, clip[0]), clip[1])


@dataclass(slots=True)
class RunningMoments:
    """Mean and variance of all values seen so far, in float64 (Chan, Golub & LeVeque 1979, the parallel form of
    Welford's update), so that the order and size of the batches do not matter."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def update(self, values: Tensor) -> None:
        """Add `values` ([B], any floating dtype)."""
        number = int(values.numel())
        if number == 0:
            return
        exact = values.double()
        mean = float(exact.mean())
        squares = float(((exact - mean) ** 2).sum())
        delta = mean - self.mean
        total = self.count + number
        self.squares += squares + delta * delta * self.count * number / total
        self.mean += delta * number / total
        self.count = total

    @property
    def std(self) -> float:
        """Biased standard deviation; 0 before any value."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class RewardCombiner:
    """Weighted sum, then optional clipping, then optional normalisation by running moments.

    Clipping comes first, so that its bounds are in the units of the user's weights, and outliers do not disturb the
    moments. The moments are updated with an episode before they normalise it.
    """

    def __init__(
        self, weights: Mapping[str, float], clip: tuple[float, float] | None = None, normalise: bool = False
    ) -> None:
        self.weights: Mapping[str, float] = dict(weights)
        self._clip = clip
        self._moments = RunningMoments() if normalise else None

    def combine(self, raw: Mapping[str, Tensor], *, counts: Tensor | None = None) -> Combined:
        """Scores of the samples whose raw rewards are `raw` (name -> [B] float).

        counts: [B] bool, True on one row of each sample, where samples have several: moments and metrics are over
        these; None takes all.

        Metrics: `reward/mean` and `reward/std` (biased) of the weighted sum as it is before clipping and
        normalisation, `reward/<name>` the mean raw reward; with clipping `reward/clip_fraction`; with
        normalisation `reward/normaliser_mean`, `reward/normaliser_std`; with either `reward/score_mean` and
        `reward/score_std` of the result. Raises `RewardError` when `raw` has other names than the weights.
        """
        import torch

        self._check_names(raw)
        if not raw and counts is not None:  # an algorithm that needs no rewards
            return Combined(torch.zeros(len(counts)), {})
        columns = {name: raw[name].detach().double() for name in self.weights}
        total = self._weighted(columns)
        if total.numel() == 0:
            return Combined(total.float(), {})
        once = torch.ones_like(total, dtype=torch.bool) if counts is None else counts
        metrics = {"reward/mean": float(total[once].mean()), "reward/std": float(total[once].std(correction=0))}
        metrics |= {f"reward/{name}": float(column[once].mean()) for name, column in columns.items()}
        scores = self._clipped(total)
        if self._clip is not None:
            metrics["reward/clip_fraction"] = float((scores != total)[once].double().mean())
        if self._moments is not None:
            self._moments.update(scores[once])
            scores = self._normalised(scores)
            metrics |= {"reward/normaliser_mean": self._moments.mean, "reward/normaliser_std": self._moments.std}
        if scores is not total:
            metrics |= {
                "reward/score_mean": float(scores[once].mean()),
                "reward/score_std": float(scores[once].std(correction=0)),
            }
        return Combined(scores.float(), metrics)

    def combine_as_before(self, raw: Mapping[str, Tensor]) -> Tensor:
        """[B] float32: scores of answers that are not trained on, in the units of the last `combine`."""
        self._check_names(raw)
        total = self._weighted({name: raw[name].detach().double() for name in self.weights})
        return self._normalised(self._clipped(total)).float()

    def _weighted(self, columns: Mapping[str, Tensor]) -> Tensor:
        import torch

        return torch.stack([self.weights[name] * column for name, column in columns.items()]).sum(0)

    def _clipped(self, total: Tensor) -> Tensor:
        return total if self._clip is None else total.clamp(*self._clip)

    def _normalised(self, scores: Tensor) -> Tensor:
        """By the moments as they are."""
        return scores if self._moments is None else (scores - self._moments.mean) / (self._moments.std + _EPS)

    def _check_names(self, raw: Mapping[str, Tensor]) -> None:
        if set(raw) != set(self.weights):
            raise RewardError(
                f"samples carry the rewards {sorted(raw)}, the run has {sorted(self.weights)}", where="rewards"
            )

    def state_dict(self) -> dict[str, Any]:
        """The running moments (JSON values); empty without normalisation."""
        return {} if self._moments is None else {"moments": asdict(self._moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. A checkpoint made without normalisation resets the moments."""
        if self._moments is not None and "moments" in state:
            self._moments = RunningMoments(**state["moments"])
