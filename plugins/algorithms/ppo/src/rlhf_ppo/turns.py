"""Rewards that an environment gave in turns."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from rlhf_core.types import Experience
from rlhf_core.whole import Whole


def turn_scores(episode: Experience, whole: Whole) -> Tensor | None:
    """[R, A] the part of the scores that was earned in turns of an environment; None without one."""
    given = episode.columns.get("turn_rewards")  # [R, A, rewards], raw
    if given is None:
        return None
    return cast(Tensor, given @ torch.tensor([whole.scalars.weights.get(name, 1.0) for name in episode.rewards]))
