"""Players: how the policy answers the prompts of a run. A section of the run file may bring one (docs/players.md).

A run's own player is one answer for each prompt, wrapped by the players of sections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import PluginError
from ..plugins.errors_of import errors_of
from ..protocols import RolloutEngine
from ..types import GenerationRequest, PhaseTimes, Prompt, SamplingParams
from ..util.kept_state import load_state_of, state_of
from .answers import answers
from .journal import Journal
from .row import Played, Row

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


class SingleTurnPlayer(TimedPlayer):
    """Samples one answer to each prompt."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        times: PhaseTimes | None = None,
    ) -> None:
        """times: shared with other players of a run."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self.times = times or PhaseTimes()

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        asked = [
            (GenerationRequest(sample_id=number, prompt_ids=each.prompt_ids, inputs=each.columns.model_inputs), each)
            for each, number in samples
        ]
        for prompt, completion in answers(self._engine, asked, self._sampling, self.times):
            row = Row(text=prompt.text, prompt_ids=prompt.prompt_ids, messages=prompt.messages)
            text = self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            assert isinstance(text, str)
            row.sample(completion, text)
            yield Played(prompt, completion.sample_id, (row,))


class RunPlayer(TimedPlayer):
    """The player of a run: one answer to each prompt, wrapped by the players of sections.

    It owns the state and the resources of all of them.
    """

    def __init__(
        self,
        run: ResolvedRun,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        *,
        seed: int,
        purpose: Purpose = "train",
        folder: Path | None = None,
    ) -> None:
        """run: its sections; of all else it reads nothing itself. folder: the run folder, for journals."""
        self.times = PhaseTimes()
        self.sections: dict[str, Player] = {}
        """The player of each section that brings one, innermost first."""
        self._columns = {name for _, columns in run.row_columns for name in columns}
        self._by = "core's player"
        self._outermost: Player = SingleTurnPlayer(engine, tokenizer, sampling, self.times)
        journals = folder / "journal" if folder is not None and folder.is_dir() else None
        with ExitStack() as stack:
            for name, section, owner in run.player_sections:
                journal = Journal(None if journals is None else journals / name / purpose)
                stack.callback(journal.close)
                context = PlayerContext(
                    self._outermost, engine, tokenizer, sampling, seed, purpose, self.times, journal, run
                )
                with errors_of(owner, f"player of the section {name}", kind=PluginError):
                    player = section.player(context)
                if player is not None:
                    stack.callback(getattr(player, "close", lambda: None))
                    self._outermost = self.sections[name] = player
                    self._by = f"the player of the section {name} ({owner})"
            self._closing = stack.pop_all()

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        """See `Player`. Raises `PluginError` if a section's player answers a sample twice or not at all, or adds a
        column that no section declares.
        """
        waiting = {sample_id for _, sample_id in samples}
        for played in self._outermost.play(samples):
            if played.sample_id not in waiting:
                raise self._wrong(f"answered sample {played.sample_id}, which is not or no longer requested")
            waiting.remove(played.sample_id)
            if unknown := {name for row in played.rows for name in row.columns} - self._columns:
                raise self._wrong(f"added a column {min(unknown)!r}, which no section declares in `columns`")
            yield played
        if waiting:
            raise self._wrong(f"left {len(waiting)} of {len(samples)} samples without an answer")

    def state_dict(self) -> dict[str, Any]:
        """State of each section's player that keeps any."""
        return {name: state for name, state in state_of(self.sections).items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_state_of(self.sections, state)

    def close(self) -> None:
        self._closing.close()

    def _wrong(self, what: str) -> PluginError:
        return PluginError(f"{self._by} {what}", where="rollout", hint="report this to the authors of the plugin")
