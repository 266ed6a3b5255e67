"""A control: GRPO with rewards that are unrelated to their answers.

rlhf train recipes/grpo-sums/run.yaml --set algorithm.advantage=recipes/grpo-sums/shuffled.py:shuffled
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rlhf_objective import needs

if TYPE_CHECKING:  # checking a run file only reads the options
    from torch import Tensor

    from rlhf_core.episode_view import EpisodeView


@needs("scalars", compares_answers=True)
def shuffled(episode: EpisodeView, *, shuffle_seed: int = 0) -> Tensor:
    """Return GRPO's advantages of the rewards, shuffled within their episode."""
    from rlhf_objective import group_normalised

    assert episode.totals is not None
    order = list(range(len(episode.totals)))
    random.Random(f"{shuffle_seed} {episode.sample_ids.tolist()}").shuffle(order)
    return group_normalised(episode.totals[order], episode.group_ids, sample_ids=episode.row_sample_ids)
