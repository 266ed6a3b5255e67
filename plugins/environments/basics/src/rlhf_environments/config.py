"""Options of the environments, and of the prompt source that comes with one of them."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config import PromptsConfig, Section


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
