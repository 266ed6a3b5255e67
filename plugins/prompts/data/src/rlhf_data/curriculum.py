"""Select the prompts to sample next from the success rates of those sampled so far.

A curriculum walks through the order of the stream and admits or skips each record. Its state depends only on the groups
of finished waves, in the order of their positions, so a run with `max_staleness` 0 is reproducible. The coordinator
owns it. Its state is in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError
from rlhf_core.prompts import PromptStream
from rlhf_core.types import RolloutGroup

if TYPE_CHECKING:
    from .curriculum_section import CurriculumConfig

_MAX_SKIPPED = 4096
"""Maximum number of records skipped per draw before the record nearest to the range is drawn."""
_POOL_VISITS = 16
"""Number of visits after which a pool's rate is used for its records that were never sampled."""


@dataclass(slots=True)
class _Estimate:
    """Success estimate of a record or of a pool."""

    rate: float = 0.0
    visits: int = 0
    perfect: int = 0
    """Consecutive visits in which every answer succeeded."""
    skipped: int = 0
    """Number of consecutive times that it was not admitted."""

    def learn(self, success: float, share: float) -> None:
        self.rate = success if not self.visits else (1 - share) * self.rate + share * success
        self.visits += 1
        self.perfect = self.perfect + 1 if success == 1.0 else 0


class Curriculum:
    """Draws records by success rate. A `Sampler` of the coordinator."""

    def __init__(self, options: CurriculumConfig, records: PromptStream, pools: Mapping[int, str]) -> None:
        """Start at the beginning of the order, without estimates.

        Args:
            options: Options of `prompts.curriculum`.
            records: Stream of the training records.
            pools: Name of the pool of every training record, by index in the source. Empty without pools.
        """
        self._options = options
        assert records.order is not None
        self._order = records.order  # without the records, because Ray sends the curriculum to the coordinator
        self._pools = pools
        self._cursor = 0
        self._records: dict[int, _Estimate] = {}
        self._by_pool: dict[str, _Estimate] = {}
        self._num_skipped = 0

    def judge(self, group: RolloutGroup) -> float | None:
        """Share of a group's answers whose score is a success. None without answers."""
        samples = [item.rewards for item in group.items if item.branch == 0]
        if not samples:
            return None
        name = self._options.reward or next(iter(samples[0]))
        return sum(rewards[name] >= self._options.success_score for rewards in samples) / len(samples)

    def draw(self, count: int, episode: int) -> list[int]:
        """Draw the next records (indices in the source) for `episode`."""
        return [self._draw_one(episode) for _ in range(count)]

    def learn(self, record: int, success: float) -> None:
        """Update the estimates with the share of a record's answers that succeeded."""
        self._records.setdefault(record, _Estimate()).learn(success, self._options.newest_share)
        if self._pools:
            pool = self._by_pool.setdefault(self._pools[record], _Estimate())
            pool.learn(success, 1 / _POOL_VISITS)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of an episode. Counts are since the last call."""
        known = [each for each in self._records.values() if each.visits]
        num_skipped, self._num_skipped = self._num_skipped, 0
        metrics = {
            "curriculum/records_seen": float(len(known)),
            "curriculum/records_retired": float(sum(map(self._is_retired, known))),
            "curriculum/passed_over": float(num_skipped),
        }
        metrics |= {f"curriculum/success/{name}": pool.rate for name, pool in sorted(self._by_pool.items())}
        if known:
            metrics["curriculum/success_mean"] = sum(each.rate for each in known) / len(known)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the cursor and the estimates of records and pools."""
        return {
            "cursor": self._cursor,
            "records": {str(index): list(astuple(each)) for index, each in self._records.items()},
            "pools": {name: list(astuple(each)) for name, each in self._by_pool.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor = int(state["cursor"])
        self._records = {int(index): _Estimate(*values) for index, values in state["records"].items()}
        self._by_pool = {name: _Estimate(*values) for name, values in state["pools"].items()}
        self._num_skipped = 0

    def _draw_one(self, episode: int) -> int:
        low, high, allowed = self._gates(episode)
        nearest: tuple[float, int] | None = None
        for _ in range(_MAX_SKIPPED):
            record = self._order.index(self._cursor)
            self._cursor += 1
            pool = self._pools.get(record)
            estimate = self._records.get(record)
            if allowed is not None and pool not in allowed:
                distance = 3.0
            elif estimate is not None and self._is_retired(estimate):
                distance = 2.0
            else:
                # A record that was never sampled uses the rate of its pool, if known.
                known = estimate if estimate is not None and estimate.visits else self._by_pool.get(pool or "")
                if known is None or (known is not estimate and known.visits < _POOL_VISITS):
                    return record
                if low <= known.rate <= high or known.skipped >= self._options.revisit_after:
                    known.skipped = 0
                    return record
                known.skipped += 1
                distance = low - known.rate if known.rate < low else known.rate - high
            self._num_skipped += 1
            if nearest is None or distance < nearest[0]:
                nearest = (distance, record)
        assert nearest is not None
        return nearest[1]

    def _gates(self, episode: int) -> tuple[float, float, frozenset[str] | None]:
        """Lowest and highest success rate, and the pools, of the latest stage that has started."""
        low, high = self._options.success
        allowed: Sequence[str] | None = None
        for stage in self._options.stages:
            if stage.from_episode <= episode:
                low, high = stage.success or self._options.success
                allowed = stage.pools
        return low, high, None if allowed is None else frozenset(allowed)

    def _is_retired(self, known: _Estimate) -> bool:
        after = self._options.retire_after
        return after is not None and known.perfect >= after


def make_curriculum(options: CurriculumConfig, records: PromptStream) -> Curriculum:
    """Create a curriculum over training records. Raise `ConfigError` if their number is unknown or one lacks a pool."""
    if records.training is None:
        raise ConfigError("requires a source with a known number of records", where="prompts.curriculum")
    pools: dict[int, str] = {}
    key = options.pool
    for index in () if key is None else records.training:
        assert key is not None
        record, name = records.at_index(index)
        if key not in record:
            raise ConfigError(f"{name} lacks `{key}`, the key of its pool", where="prompts.curriculum.pool")
        pools[index] = str(record[key])
    named = {pool for stage in options.stages for pool in stage.pools or ()}
    if unknown := sorted(named - set(pools.values())):
        known = ", ".join(sorted(set(pools.values()))[:20])
        raise ConfigError(f'the pool "{unknown[0]}" is empty (pools: {known})', where="prompts.curriculum.stages")
    return Curriculum(options, records, pools)
