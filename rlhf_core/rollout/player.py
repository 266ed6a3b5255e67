"""Players: how the policy answers the prompts of a run. A section of the run file may bring one (docs/players.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..protocols import RolloutEngine
from ..types import PhaseTimes, Prompt, SamplingParams
from .journal import Journal
from .row import Played

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config.resolve import ResolvedRun


Purpose = Literal["train", "greedy", "evaluation"]


class Player(ABC):
    """Has the policy answer samples: once, in the turns of an environment, or as a plugin's section chooses."""

    @abstractmethod
    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        """Yield the answer to each (prompt, sample id) once, as soon as it is finished, in any order."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints keep: tensors and plain values. Empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state after a resume or a rollback. Not called if there is none."""

    def close(self) -> None:
        """Release resources. Core closes each section's player, so a wrapper does not close its default."""


class TimedPlayer(Player):
    """A player that a maker uses directly."""

    times: PhaseTimes
    """Times and token counts of its plays. The maker takes them."""


@dataclass(frozen=True, slots=True)
class PlayerContext:
    """The argument of `Section.player`."""

    default: Player
    """The player to wrap: one answer for each prompt, or the player of the section before."""
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    """How answers are sampled; greedily for the purpose `greedy`."""
    seed: int
    """The run's seed."""
    purpose: Purpose
    """train: samples to train on. greedy: one more answer to each training prompt, as a baseline."""
    times: PhaseTimes
    """For a player that calls `engine` itself: add seconds and tokens here. The default adds its own."""
    journal: Journal
    """Lines in the run folder, which outlive a crash. Each section and purpose has its own."""
    run: ResolvedRun
