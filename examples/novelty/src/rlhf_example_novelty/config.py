"""Options of the algorithm, the hook, the engine, the optimizer and the schedule, and the name of the kind of model."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import Field

from rlhf_core import Section
from rlhf_core.config import EngineConfig, Problem, ResolvedRun

VARIED_PATH, VARIED_TYPE = "builtin:varied-digits", "rlhf-example-varied"
"""Claims of the kind of model: a path, and the `model_type` in the folder of a saved model."""


class FromNovelty(Section):
    """Base of options that may be null: the section `novelty` then provides them, so a run file states them once."""

    adapt_reasons = {"": "from the section novelty"}  # noqa: RUF012 - core only reads it

    goal: float | None = Field(None, gt=0, description="Goal in nats per token. null: novelty.goal.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if self.goal is None and run.section("novelty") is None:
            yield Problem("goal", "is not set, and the run has no section novelty", "add novelty: {goal: 2.0}")

    def adapt(self, run: ResolvedRun) -> "FromNovelty":
        section = run.section("novelty")
        if section is None:
            return self
        shared = section.adapt(run)
        return self.model_copy(update={name: getattr(shared, name) for name, value in self if value is None})


class WitnessConfig(Section):
    """The frozen model that measures novelty. It must have the tokens of the policy."""

    path: str = Field(min_length=1, description="A model folder, a hub name, or `builtin:NAME`.")
    offload: bool = Field(False, description="Keep it in host memory between its passes.")


class NovelConfig(FromNovelty):
    """REINFORCE with the episode's mean score as baseline, and a larger weight for new tokens."""

    witness: WitnessConfig = Field(description="The model that measures novelty.")
    bonus: float = Field(1.0, ge=0, description="Additional weight of a token that is as new as the goal, or newer.")


class NoveltyGoalConfig(FromNovelty):
    """Ends the run as done once its answers are as new as the goal."""

    patience: int | None = Field(None, ge=1, description="Consecutive episodes. null: novelty.patience.")


class HotStartConfig(EngineConfig):
    """The engine: it samples the first token of an answer at its own temperature."""

    request_options: ClassVar[Mapping[str, str]] = {
        "first_temperature": "softmax temperature of the first token of an answer, above 0, unless it is greedy"
    }

    max_batch_size: int = Field(64, ge=1, description="Answers sampled together.")


class SignumConfig(Section):
    """Signum (Bernstein 2018, arXiv:1802.04434)."""

    momentum: float = Field(0.9, ge=0, lt=1, description="Decay of the mean gradient.")


class RestartsConfig(Section):
    """Cosine annealing with warm restarts (Loshchilov 2016, arXiv:1608.03983)."""

    cycles: int = Field(2, ge=1, description="Number of times that the rate falls from its peak to 0.")
