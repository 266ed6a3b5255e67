"""Options of the environment `program`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from rlhf_core.config import Command, Section
from rlhf_core.errors import ConfigError
from rlhf_episodes.selected import reward_section

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ProgramConfig(Section):
    """Options of the environment `program`."""

    command: Command = Field(
        description="Program and arguments, started in the working folder of each episode. A program with a slash is a "
        "file, relative to the run's working folder, and one without is searched in PATH. {prompt}, {model}, "
        "{base_url}, {anthropic_base_url} and {api_key} in arguments are replaced."
    )
    score: Command | dict[str, Any] = Field(
        description="Reward of the working folder after the program has ended: a command (reward 1 if it exits with 0, "
        "else 0), or a reward (NAME, FILE.py:NAME or a mapping with `name`), which finds the folder's path as `folder` "
        "in the metadata. {prompt} and {answer} in arguments of a command are replaced."
    )
    score_is_printed: bool = Field(
        False, description="The reward is the number in the last line that the command of `score` prints."
    )
    score_seconds: float = Field(
        30.0, gt=0, description="Deadline of a command of `score` in seconds. A command that exceeds it gives reward 0."
    )
    variables: dict[Variable, str] = Field(
        default_factory=dict,
        description="Environment variables of the program, in addition to OPENAI_BASE_URL, OPENAI_API_KEY, "
        "ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, … The same words in braces are replaced as in `command`.",
    )
    read: list[Annotated[str, StringConstraints(min_length=1)]] = Field(
        default_factory=list,
        description="Files and folders that program and score may read, in addition to the system's programs and this "
        "Python with its packages. Relative to the run's working folder.",
    )
    program_memory_bytes: int = Field(
        2 * 2**30, ge=2**26, description="Maximum resident memory of the program, summed over its processes."
    )
    program_cpu_seconds: int = Field(
        120, ge=1, description="Maximum processor time of the program, summed over its processes."
    )
    max_processes: int = Field(256, ge=1, description="Maximum number of processes and threads of the program.")
    max_output_bytes: int = Field(
        2**20, ge=1, description="Maximum size of its output and of its error output, each. Writing more is a failure."
    )
    max_folder_bytes: int = Field(
        2**28,
        ge=2**20,
        description="Maximum size of its working folder, home and temporary folder together, in memory.",
    )
    max_files: int = Field(20_000, ge=16, description="Maximum number of files and folders in them.")

    @field_validator("score", mode="before")
    @classmethod
    def _expand_reward(cls, score: Any) -> Any:
        if not isinstance(score, str):
            return score
        try:
            return reward_section(score)
        except ConfigError as error:
            raise ValueError(error.message) from None

    @model_validator(mode="after")
    def _check_score(self) -> Self:
        if self.score_is_printed and not isinstance(self.score, list):
            raise ValueError("score_is_printed: a reward returns its score: remove it, or make score a command")
        return self

    def selections(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        if isinstance(self.score, dict):
            yield "rewards", "score", self.score

    def with_selections(self, selected: Sequence[Mapping[str, Any]]) -> Self:
        return self.model_copy(update={"score": dict(selected[0])}) if selected else self
