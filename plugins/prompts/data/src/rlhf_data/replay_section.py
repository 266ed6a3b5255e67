"""The section `player`, in its own file, because it is imported with every run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from pydantic import Field

from rlhf_core import Component, Section
from rlhf_core.config import Problem
from rlhf_core.errors import ConfigError, UserInputError
from rlhf_core.runfolder import RunFolder

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun
    from rlhf_core.rollout import Player, PlayerContext
    from rlhf_core.wiring import RunInputs

_NOT_RECORDED: Mapping[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "banned_words": [],
    "options": {},
}
"""Option of an engine that changes the sampled distribution -> the value at which it is off."""


class ReplayConfig(Section):
    """Train on the sampled tokens of an earlier run instead of new ones."""

    replay: str = Field(
        min_length=1, description="Folder of the run, which must have been made with logging.sample_tokens: true."
    )
    episodes: int | None = Field(
        None, ge=1, description="Replay only the prompts of this many first episodes, then sample. null replays all."
    )

    adapt_reasons: ClassVar[Mapping[str, str]] = {"replay": "other processes and a resume need an absolute path"}

    def adapt(self, run: ResolvedRun) -> Self:
        """Make the path absolute.

        Args:
            run: The resolved run.
        """
        return self.model_copy(update={"replay": str(Path(self.replay).absolute())})

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield problems of this run and of the recorded one.

        Args:
            run: The resolved run.
        """
        if not run.rolls_out:
            yield Problem("", f"{run.algorithm.name} learns from a dataset, without answers to replay")
            return
        if run.section("environment") is not None:
            yield Problem("", "replays single answers, not an environment's episodes", "remove the environment")
        if run.section("prompts.sampling") is not None:
            problem = "prompts.sampling sets options of new answers, but recorded ones are replayed"
            yield Problem("replay", problem, "remove the section prompts.sampling")
        try:
            recorded = RunFolder.read(Path(self.replay)).read_config()
        except UserInputError as error:
            yield Problem("replay", f"{self.replay}: {error.message}", error.hint)
            return
        yield from self._recording_problems(recorded, run.sampling.temperature)

    def _recording_problems(self, recorded: Mapping[str, Any], temperature: float) -> Iterator[Problem]:
        """Yield the reasons why the recorded run cannot be replayed. `recorded`: its resolved run file."""
        engine, prompts = recorded.get("engine") or {}, recorded.get("prompts") or {}
        if not (recorded.get("logging") or {}).get("sample_tokens"):
            problem = "that run did not record tokens"
            yield Problem("replay", problem, "make it again with --set logging.sample_tokens=true")
        if recorded.get("environment"):
            yield Problem("replay", "that run played an environment, and only single answers are replayed")
        for name, off in _NOT_RECORDED.items():
            if (value := engine.get(name, off)) != off:
                problem = f"that run sampled with {name}: {value}, whose distribution is not recorded"
                yield Problem("replay", problem, f"replay a run with engine.{name}: {off}")
        if recorded.get("prompts.sampling") or prompts.get("sampling"):
            yield Problem("replay", "that run sampled each prompt with its own options, which are not recorded")
        if (sampled_at := engine.get("temperature", 1.0)) != temperature:
            problem = f"that run sampled at temperature {sampled_at}, but this run's log-probs are at {temperature}"
            yield Problem("replay", problem, f"set engine.temperature to {sampled_at}")

    def check_inputs(self, inputs: RunInputs) -> None:
        """Raise `ConfigError` or `DataError` if samples that this run needs are not recorded.

        Args:
            inputs: The run's inputs.
        """
        if getattr(inputs.algorithm, "needs_greedy_answer", False):
            raise ConfigError(
                "the algorithm compares with greedy answers, which are not recorded",
                where="player.replay",
                hint="use another advantage estimator",
            )
        train = inputs.resolved.run.train
        num_episodes = train.episodes if self.episodes is None else min(self.episodes, train.episodes)
        self._samples().check_complete(num_episodes * train.samples_per_episode)

    def player(self, context: PlayerContext) -> Player | None:
        """Return the player of training samples. Evaluations sample with the engine.

        Args:
            context: The player to wrap, and the run.
        """
        if context.purpose != "train":
            return None
        train = context.run.run.train
        limit = None if self.episodes is None else self.episodes * train.prompts_per_episode
        return cast("Player", import_module("rlhf_data.replay").ReplayPlayer(context, self._samples(), limit))

    def _samples(self) -> Any:
        return import_module("rlhf_data.replay").RecordedSamples(RunFolder(Path(self.replay)).samples)


player = Component(summary="Trains on the recorded samples of an earlier run.", config=ReplayConfig)
