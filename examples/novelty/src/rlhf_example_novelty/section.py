"""The section `novelty` of a run file: options shared by this distribution's algorithm and hook, and the player.

It is checked together with the rest of the run, which also provides missing values.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import Field

from rlhf_core import Column, Component, Section
from rlhf_core.config import Problem, ResolvedRun
from rlhf_core.rollout import Player, PlayerContext


class NoveltyConfig(Section):
    """Required novelty of answers, for the witness and for their prompt."""

    short_option: ClassVar[str | None] = "goal"  # `novelty: 5.0` is `novelty: {goal: 5.0}`
    adapt_reasons = {"patience": "a tenth of the episodes of this run"}  # noqa: RUF012
    columns: ClassVar[Mapping[str, Column]] = {"draws": Column(per="sample", dtype="int64")}
    """Column of the player: the number of answers sampled for the sample."""

    goal: float = Field(2.0, gt=0, description="Mean surprise of the witness that counts as new, in nats per token.")
    patience: int | None = Field(
        None, ge=1, description="Consecutive episodes that must reach the goal. null: a tenth of the run."
    )
    tries: int = Field(2, ge=1, description="Maximum answers per sample, until one is new for its prompt.")
    memory: int = Field(1000, ge=1, description="Number of the latest answers that count as known.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Report another algorithm, which does not measure novelty, and a run that is too short."""
        from .config import NovelConfig

        if not isinstance(run.algorithm.config, NovelConfig):
            yield Problem(
                "goal", f"the algorithm {run.algorithm.name} measures no novelty", "set algorithm.name: novel"
            )
        episodes = run.run.train.episodes
        if self.patience is not None and self.patience > episodes:
            yield Problem("patience", f"is {self.patience}, the run has {episodes} episodes")

    def adapt(self, run: ResolvedRun) -> "NoveltyConfig":
        """Fill in missing options. `rlhf config check` shows the change and its reason."""
        if self.patience is not None:
            return self
        return self.model_copy(update={"patience": max(1, run.run.train.episodes // 10)})

    def player(self, context: PlayerContext) -> Player | None:
        """Return the player of training answers. Core's player samples greedy answers and those of evaluations."""
        from .player import NewAnswers

        return NewAnswers(self, context) if context.purpose == "train" else None


novelty = Component("How new answers should be.", NoveltyConfig)
