"""The section `train.deterministic` of a run file. Imports only pydantic and core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.components import Component
from rlhf_core.config import Section

if TYPE_CHECKING:
    from rlhf_core.rollout.player import Player, PlayerContext
    from rlhf_core.runfolder import CheckpointStore


class DeterministicConfig(Section):
    """`train.deterministic` section: float32 matrices on a CPU are multiplied by the same library on every machine."""

    # Core calls the first method in the processes that train, and the second one in those that sample.

    def checkpoint_store(self, store: CheckpointStore) -> CheckpointStore:
        _fix()
        return store

    def player(self, context: PlayerContext) -> Player | None:
        _fix()
        return None


def _fix() -> None:
    from .products import fix_products

    fix_products(fixed=True)


deterministic = Component(
    summary="Computes with torch's own matrix products on every machine, also where measured ones are faster",
    config=DeterministicConfig,
)
