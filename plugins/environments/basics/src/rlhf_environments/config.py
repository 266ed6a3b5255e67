"""Options of the environments, and of the prompt source that comes with one of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config import PromptsConfig, Section

PYTHON = "python"
"""The tool that comes with this distribution."""


class GuessNumberConfig(Section):
    """Options of the environment `guess-number`."""

    numbers: int = Field(10, ge=2, description="The number is one of 0 to this minus 1.")
    shuffle_observations: bool = Field(
        False, description="Answer higher or lower at random: the control, in which nothing can be learnt from answers."
    )


class GuessesConfig(PromptsConfig):
    """Options of the prompt source `guess-number`."""

    numbers: int = Field(10, ge=2, description="Numbers to guess from: 0 to this minus 1.")
    size: int | None = Field(None, ge=1, description="How many games; null is one for each number.")
    max_past_guesses: int = Field(
        0,
        ge=0,
        description="Guesses already made in a game: from 0 to this, drawn at random, as are the guesses; for a "
        "supervised warm start.",
    )
    end_of_turn: str = Field("<eos>", description="How the tokenizer's end-of-sequence token is written in text.")
    problem_seed: int = Field(0, ge=0, description="Which games; independent of the run's seed, as a file would be.")


class ConversationConfig(Section):
    """Options of the environment `conversation`."""

    turns_key: str = Field(
        "turns", min_length=1, description="Metadata key of a prompt's later user turns: a list of texts or messages."
    )


class ToolsConfig(Section):
    """Options of the environment `tools`."""

    functions: list[str] = Field(
        min_length=1, description="The tools: FILE.py:FUNCTION, or `python`, which runs programs in the sandbox."
    )
    allow_execution: bool = Field(False, description="Must be true for `python`: it runs programs that a model wrote.")
    python_timeout_seconds: float = Field(5.0, gt=0, description="Wall-clock limit of one program.")
    python_cpu_seconds: int = Field(5, ge=1, description="Processor time of one program, over all its processes.")
    python_memory_bytes: int = Field(512 * 2**20, ge=2**26, description="Memory of one program.")
    python_sandbox: Literal["namespaces", "landlock"] = Field(
        "namespaces", description="How it is shut in; landlock is the weaker mode, where namespaces are forbidden."
    )
    max_output_chars: int = Field(10_000, ge=1, description="Longest text that `python` gives back; the rest is cut.")

    @model_validator(mode="after")
    def _can_be_called(self) -> ToolsConfig:
        wrong = [name for name in self.functions if name != PYTHON and ".py:" not in name]
        if wrong:
            raise ValueError(f"functions: {wrong[0]!r} is neither FILE.py:FUNCTION nor {PYTHON}")
        called = [name.rpartition(":")[2] for name in self.functions]
        if twice := next((name for name in called if called.count(name) > 1), None):
            raise ValueError(f"functions: two tools are called {twice!r}; rename one of the functions")
        if PYTHON in self.functions and not self.allow_execution:
            raise ValueError(
                "the tool python runs programs that a model wrote: say allow_execution: true if you mean it"
            )
        return self
