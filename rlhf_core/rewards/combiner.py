"""Combines raw rewards by name into one score per sample. The trainer does this for a whole episode."""

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
    """Return the score of one sample before normalization, in float64, as `RewardCombiner` computes it.

    Example:
        >>> combined_score({"exact": 1.0, "format": 0.5}, (-1.0, 1.0), {"exact": 1.0, "format": 0.5})  # 1.25, clipped
        1.0
    """
    total = math.fsum(weight * raw[name] for name, weight in weights.items())
    return total if clip is None else min(max(total, clip[0]), clip[1])


@dataclass(slots=True)
class RunningMoments:
    """Mean and variance of all values seen so far, in float64, independent of the order and size of batches.

    Uses the parallel form of Welford's update (Chan, Golub & LeVeque 1979).
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

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
        """Biased standard deviation. 0 before the first value."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class RewardCombiner:
    """Weighted sum of rewards, then optional clipping, then optional normalization by running moments.

    Clipping precedes normalization, so that its bounds are in the units of the user's weights, and outliers do not
    affect the moments. The moments are updated with an episode before they normalize it.

    Example:
        >>> import torch
        >>> combiner = RewardCombiner({"exact": 1.0, "length": -0.5}, clip=(0.0, 1.0))
        >>> combined = combiner.combine({"exact": torch.tensor([1.0, 0.0]), "length": torch.tensor([1.0, 2.0])})
        >>> combined.scores, combined.metrics["reward/mean"]  # 1 - 0.5 and 0 - 1, which is clipped to 0
        (tensor([0.5000, 0.0000]), -0.25)
    """

    def __init__(
        self, weights: Mapping[str, float], clip: tuple[float, float] | None = None, normalise: bool = False
    ) -> None:
        """Create a combiner at the start of a run.

        Args:
            weights: Reward name -> factor.
            clip: Minimum and maximum of the weighted sum. None does not clip.
            normalise: Whether to subtract the running mean and divide by the running standard deviation.
        """
        self.weights: Mapping[str, float] = dict(weights)
        self._clip = clip
        self._moments = RunningMoments() if normalise else None

    def combine(self, raw: Mapping[str, Tensor], *, counts: Tensor | None = None) -> Combined:
        """Combine the rewards of an episode.

        Args:
            raw: Reward name -> [B] float, raw.
            counts: [B] bool, True on one row per sample if samples have several rows. Moments and metrics are over
                these rows. None uses all rows.

        Returns:
            Scores, and metrics: `reward/mean` and `reward/std` (biased) of the weighted sum before clipping and
            normalization, and `reward/<name>`, the mean raw reward. With clipping `reward/clip_fraction`. With
            normalization `reward/normaliser_mean` and `reward/normaliser_std`. With either `reward/score_mean` and
            `reward/score_std` of the result.

        Raises:
            RewardError: The names in `raw` are not those of the weights.
        """
        import torch

        self._check_names(raw)
        if not raw and counts is not None:  # the algorithm does not need rewards
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
        """[B] float32: scores of answers that are not trained on, with the moments of the last `combine`."""
        self._check_names(raw)
        total = self._weighted({name: raw[name].detach().double() for name in self.weights})
        return self._normalised(self._clipped(total)).float()

    def _weighted(self, columns: Mapping[str, Tensor]) -> Tensor:
        import torch

        return torch.stack([self.weights[name] * column for name, column in columns.items()]).sum(0)

    def _clipped(self, total: Tensor) -> Tensor:
        return total if self._clip is None else total.clamp(*self._clip)

    def _normalised(self, scores: Tensor) -> Tensor:
        """Normalize by the current moments, without an update."""
        return scores if self._moments is None else (scores - self._moments.mean) / (self._moments.std + _EPS)

    def _check_names(self, raw: Mapping[str, Tensor]) -> None:
        if set(raw) != set(self.weights):
            raise RewardError(
                f"samples have the rewards {sorted(raw)}, the run has {sorted(self.weights)}", where="rewards"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the running moments as JSON values. Empty without normalization."""
        return {} if self._moments is None else {"moments": asdict(self._moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the running moments. A state without moments (no normalization) changes nothing."""
        if self._moments is not None and "moments" in state:
            self._moments = RunningMoments(**state["moments"])
