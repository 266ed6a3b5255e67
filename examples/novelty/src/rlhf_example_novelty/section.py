"""The section `novelty` of a run file: what the algorithm and the hook of this distribution share, and the player.

It is checked together with the rest of the run, and completes itself from the rest of the run.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import Field

from rlhf_core import Column, Component, Section
from rlhf_core.config import Problem, ResolvedRun
from rlhf_core.rollout import Player, PlayerContext


class NoveltyConfig(Section):
    """How new answers should be, to the witness and to their prompt."""

    adapt_reasons = {"patience": "a tenth of the episodes of this run"}  # noqa: RUF012
    columns: ClassVar[Mapping[str, Column]] = {"draws": Column(per="sample", dtype="int64")}
    """Columns that the player fills: the number of answers drawn for the sample."""

    goal: float = Field(2.0, gt=0, description="Mean surprise of the witness, in nats per token, that is new enough.")
    patience: int | None = Field(
        None, ge=1, description="Episodes in a row that have to reach the goal; null is a tenth of the run."
    )
    tries: int = Field(2, ge=1, description="Maximum answers drawn for a sample, until one is new to its prompt.")
    memory: int = Field(1000, ge=1, description="Number of the latest answers that count as known.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """The cross-check: another algorithm measures no novelty, and a run may be too short."""
        from .config import NovelConfig

        if not isinstance(run.algorithm.config, NovelConfig):
            yield Problem(
                "goal", f"the algorithm {run.algorithm.name} measures no novelty", "set algorithm.name: novel"
            )
        episodes = run.run.train.episodes
        if self.patience is not None and self.patience > episodes:
            yield Problem("patience", f"is {self.patience}, the run has {episodes} episodes")

    def adapt(self, run: ResolvedRun) -> "NoveltyConfig":
        """Fill in what the run file leaves open. `rlhf config check` shows the change and its reason."""
        if self.patience is not None:
            return self
        return self.model_copy(update={"patience": max(1, run.run.train.episodes // 10)})

    def player(self, context: PlayerContext) -> Player | None:
        """Answers to train on are drawn by it; greedy ones, and those of evaluations, by core's player alone."""
        from .player import NewAnswers

        return NewAnswers(self, context) if context.purpose == "train" else None


novelty = Component("How new answers should be.", NoveltyConfig)
