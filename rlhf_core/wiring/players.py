"""The player of a run: what its sections bring, around one answer for each prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..config.resolve import ResolvedRun
from ..protocols import RolloutEngine
from ..rollout.journal import Journal
from ..rollout.player import PlayerContext, Purpose, RunPlayer
from ..rollout.single_answer import SingleAnswers
from ..types import PhaseTimes, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_player(
    resolved: ResolvedRun,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    *,
    seed: int,
    purpose: Purpose = "train",
    run_folder: Path | None = None,
) -> RunPlayer:
    """Build the player of the sections of `resolved`; of all else it reads nothing itself.

    run_folder: for the journals of players.
    """
    times = PhaseTimes()
    default = SingleAnswers(engine, tokenizer, sampling, times)
    context = PlayerContext(default, engine, tokenizer, sampling, seed, purpose, times, Journal(None), resolved)
    return RunPlayer(context, run_folder)
