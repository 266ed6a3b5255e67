"""The section `prompts.sampling`: request options of each prompt, read from its record.

Its own file, because it is imported with every run file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rlhf_core import Component, Section
from rlhf_core.config import Problem

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun
    from rlhf_core.rollout import Player, PlayerContext


def _key(option: str) -> Any:
    return Field(None, min_length=1, description=f"Key of the record with the prompt's {option}.")


class PromptSamplingConfig(Section):
    """Sample each prompt's answers with options of its record. A prompt without the key has the run's value."""

    temperature: str | None = _key("temperature")
    min_p: str | None = _key("min-p")
    repetition_penalty: str | None = _key("repetition penalty")
    presence_penalty: str | None = _key("presence penalty")
    structure: str | None = _key("structure, such as {regex: …}")

    @property
    def keys(self) -> Mapping[str, str]:
        """Request option -> key of the record, for the options that are set."""
        return {name: key for name in type(self).model_fields if (key := getattr(self, name)) is not None}

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield problems: an algorithm without rollouts, an environment, or an engine that does not accept an option.

        Args:
            run: The resolved run.
        """
        if not run.rolls_out:
            yield Problem("", f"{run.algorithm.name} does not sample answers", "remove the section")
            return
        if run.section("environment") is not None:
            problem = "an environment makes its own requests"
            yield Problem("", problem, "remove the section, and pass options to policy.turn in the environment")
        accepted = getattr(run.engine.config, "request_options", {})
        for name in self.keys.keys() - accepted.keys():
            problem = f"the engine {run.engine.name} does not accept this request option"
            yield Problem(name, problem, f"it accepts {', '.join(accepted) or 'none'}")

        ask = getattr(run.engine.config, "min_p_problem", None)
        if "min_p" in self.keys and ask is not None and (problem := ask()) is not None:
            yield Problem("min_p", problem, "remove the key")

    def player(self, context: PlayerContext) -> Player | None:
        """Return a player for training samples. Evaluations and greedy answers use the run's options.

        Args:
            context: Engine, tokenizer and sampling parameters.
        """
        if context.purpose != "train" or not self.keys:
            return None
        from .prompt_player import PromptPlayer

        return PromptPlayer(context, self.keys)


sampling = Component(summary="Request options of each prompt, from its record.", config=PromptSamplingConfig)
