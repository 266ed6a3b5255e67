"""Options of the environments and of the prompt source `guess-number`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config import PromptsConfig, Section

PYTHON = "python"
"""Name of the tool included in this distribution."""


class GuessNumberConfig(Section):
    """Options of the environment `guess-number`."""

    numbers: int = Field(10, ge=2, description="The hidden number is between 0 and this minus 1.")
    shuffle_observations: bool = Field(
        False, description="Answer higher or lower at random, as a control in which hints carry no information."
    )


class GuessesConfig(PromptsConfig):
    """Options of the prompt source `guess-number`."""

    numbers: int = Field(10, ge=2, description="Hidden numbers are between 0 and this minus 1.")
    size: int | None = Field(None, ge=1, description="Number of games. null is one per number.")
    max_past_guesses: int = Field(
        0,
        ge=0,
        description="Maximum number of past guesses in a game, for a supervised warm start. Number and values of past "
        "guesses are random.",
    )
    end_of_turn: str = Field("<eos>", description="Text of the tokenizer's end-of-sequence token.")
    problem_seed: int = Field(0, ge=0, description="Seed of the games, independent of the run's seed.")


class ConversationConfig(Section):
    """Options of the environment `conversation`."""

    turns_key: str = Field(
        "turns", min_length=1, description="Metadata key of a prompt's later user turns, a list of texts or messages."
    )


class ToolsConfig(Section):
    """Options of the environment `tools`."""

    functions: list[str] = Field(
        min_length=1, description="Tools: FILE.py:FUNCTION, or `python` to run programs in the sandbox."
    )
    allow_execution: bool = Field(False, description="Required for `python`, which runs programs written by the model.")
    python_timeout_seconds: float = Field(5.0, gt=0, description="Wall-clock limit of a program, in s.")
    python_cpu_seconds: int = Field(5, ge=1, description="CPU time limit of a program over all its processes, in s.")
    python_memory_bytes: int = Field(512 * 2**20, ge=2**26, description="Memory limit of a program.")
    python_sandbox: Literal["namespaces", "landlock"] = Field(
        "namespaces", description="Isolation of programs. landlock is weaker, for hosts that forbid namespaces."
    )
    max_output_chars: int = Field(10_000, ge=1, description="Maximum output of `python`. Longer output is cut.")

    @model_validator(mode="after")
    def _check_functions(self) -> ToolsConfig:
        wrong = [name for name in self.functions if name != PYTHON and ".py:" not in name]
        if wrong:
            raise ValueError(f"functions: {wrong[0]!r} is neither FILE.py:FUNCTION nor {PYTHON}")
        names = [name.rpartition(":")[2] for name in self.functions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"functions: two tools are named {twice!r}: rename one of the functions")
        if PYTHON in self.functions and not self.allow_execution:
            raise ValueError(
                "the tool python runs programs written by the model: set allow_execution: true to allow it"
            )
        return self
