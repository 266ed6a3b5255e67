"""Options of the environments and of the prompt source `guess-number`."""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_core.config import Problem, PromptsConfig, Section
from rlhf_core.errors import PluginError
from rlhf_core.plugins import load
from rlhf_web import ChatModelOptions

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun

INSTRUCTIONS = """You are the user in a conversation with an assistant. You are not the assistant.
{persona}
Your goal: {goal}
Write only your next message to the assistant, in your own words. Once your goal is reached, or if you give up, write \
{end}"""
_PLACEHOLDERS = frozenset({"persona", "goal", "end"})
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


class UserConfig(ChatModelOptions):
    """Options of the environment `user`: the model that plays the user, and its instructions."""

    max_connections: int = Field(8, ge=1, description="Maximum number of concurrent requests to the server.")
    patience_seconds: float = Field(
        45.0,
        ge=0,
        description="Total time for retries of a request while the server is busy, unavailable, or loses it. Keep it "
        "below environment.timeout_seconds, which bounds each message.",
    )
    device: str = Field("auto", min_length=1, description="Device of a local model: auto, cpu or cuda:N.")
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of the user. 0 is greedy.")
    max_message_tokens: int = Field(256, ge=1, description="Maximum length of a message of the user in tokens.")
    instructions: str = Field(
        INSTRUCTIONS, min_length=1, description="Instructions to the user, with {persona}, {goal} and {end}."
    )
    end_text: str = Field("[END]", min_length=1, description="Text with which the user ends the conversation.")
    persona_key: str = Field("persona", min_length=1, description="Key of the record that describes the user.")
    goal_key: str = Field("goal", min_length=1, description="Key of the record with the user's goal.")

    @field_validator("instructions")
    @classmethod
    def _knows_placeholders(cls, text: str) -> str:
        try:
            names = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
        except ValueError as error:
            raise ValueError(f"is not a template: {error}. Write {{{{ and }}}} for braces") from None
        if unknown := sorted(names - _PLACEHOLDERS):
            raise ValueError(f"has {{{unknown[0]}}}, but only {{persona}}, {{goal}} and {{end}} are replaced")
        if "end" not in names:
            raise ValueError("needs {end}, the text with which the user ends the conversation")
        return text

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield a problem if the engine of a local model does not exist.

        Args:
            run: The resolved run.
        """
        yield from super().check(run)
        if self.model_path is not None:
            try:
                load("engines", self.engine)
            except PluginError as error:
                yield Problem("engine", error.message, error.hint)
