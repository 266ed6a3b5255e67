"""Players: how the policy answers the prompts of a run. A section of the run file may provide one (docs/players.md).

Core's player samples one answer to each prompt. The players of sections wrap it.
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
    """Lets the policy answer prompts: once, in turns with an environment, or as a section of a plugin chooses.

    Each process that samples answers builds its players with `Section.player`, one per purpose. Its experience maker
    calls `play` for each batch of prompts. The processes share the prompts, so their calls differ.

    Example:
        player = section.player(context)  # on each sampling rank
        player.load_state_dict(state)  # after a resume
        for prompts in batches_of_this_rank:
            for played in player.play([(prompt, sample_id(prompt, k)) for prompt in prompts for k in range(n)]):
                score(played)
        player.close()
    """

    @abstractmethod
    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        """Yield the answer to each sample once, as soon as it is finished, in any order.

        Args:
            samples: Pairs of a prompt and a sample id, which is unique.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, as tensors and plain values. Empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state after a resume or a rollback. Not called if the state is empty."""

    def close(self) -> None:
        """Release resources. Core closes each section's player, so a wrapper does not close its default."""


class TimedPlayer(Player):
    """A player that a maker uses directly."""

    times: PhaseTimes
    """Times and token counts of calls to `play` since the maker last took them."""


@dataclass(frozen=True, slots=True)
class PlayerContext:
    """The argument of `Section.player`."""

    default: Player
    """The player to wrap: core's, with one answer per prompt, or that of the previous section."""
    engine: RolloutEngine
    """The engine over the policy."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""
    sampling: SamplingParams
    """Sampling parameters of answers. Greedy for the purpose `greedy`."""
    seed: int
    """The run's seed."""
    purpose: Purpose
    """train: samples to train on. greedy: one more answer to each training prompt, as a baseline. evaluation: held-out
    prompts."""
    times: PhaseTimes
    """A player that calls `engine` itself adds its seconds and tokens here. The default player adds its own."""
    journal: Journal
    """Lines in the run folder that survive a crash. Each section and purpose has a separate journal."""
    run: ResolvedRun
    """The resolved run file."""


class SingleTurnPlayer(TimedPlayer):
    """Samples one answer to each prompt."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        times: PhaseTimes | None = None,
    ) -> None:
        """Create a player.

        Args:
            engine: Samples the answers.
            tokenizer: Decodes them.
            sampling: Sampling parameters.
            times: Receives seconds and token counts. Players of a run may share it. None creates one.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self.times = times or PhaseTimes()

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        requests = [
            (GenerationRequest(sample_id=number, prompt_ids=each.prompt_ids, inputs=each.columns.model_inputs), each)
            for each, number in samples
        ]
        for prompt, completion in answers(self._engine, requests, self._sampling, self.times):
            row = Row(text=prompt.text, prompt_ids=prompt.prompt_ids, messages=prompt.messages)
            text = self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            assert isinstance(text, str)
            row.sample(completion, text)
            yield Played(prompt, completion.sample_id, (row,))


class RunPlayer(TimedPlayer):
    """The player of a run: core's player, wrapped by the players of sections, with their states and resources."""

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
        """Build the players of all sections of `run`. `folder`: the run folder, for journals."""
        self.times = PhaseTimes()
        self.sections: dict[str, Player] = {}
        """Section -> player, innermost first."""
        self._columns = {name for _, columns in run.row_columns for name in columns}
        self._outermost_label = "core's player"
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
                    self._outermost_label = f"the player of the section {name} ({owner})"
            self._closing = stack.pop_all()

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        """Yield the answer to each sample (see `Player`).

        Raises `PluginError` if a section's player answers a sample twice or not at all, or adds an undeclared column.
        """
        waiting = {sample_id for _, sample_id in samples}
        for played in self._outermost.play(samples):
            if played.sample_id not in waiting:
                raise self._wrong(f"answered sample {played.sample_id}, which is not or no longer requested")
            waiting.remove(played.sample_id)
            if unknown := {n for row in played.rows for n in row.columns} - {*self._columns, *played.prompt.columns}:
                raise self._wrong(f"added a column {min(unknown)!r}, which no section declares in `columns`")
            yield played
        if waiting:
            raise self._wrong(f"left {len(waiting)} of {len(samples)} samples unanswered")

    def state_dict(self) -> dict[str, Any]:
        """Return section -> state of its player, without empty states."""
        return {name: state for name, state in state_of(self.sections).items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_state_of(self.sections, state)

    def close(self) -> None:
        self._closing.close()

    def _wrong(self, problem: str) -> PluginError:
        text = f"{self._outermost_label} {problem}"
        return PluginError(text, where="rollout", hint="report this to the authors of the plugin")
