"""The responses of completion servers of which a teacher reads log-probs."""

from __future__ import annotations

import math

from pydantic import BaseModel, ValidationError


class TokenEntry(BaseModel):
    """A token in a response of vLLM."""

    logprob: float
    decoded_token: str | None = None


class EchoedTokens(BaseModel):
    """The tokens of an echoed prompt in OpenAI's form."""

    token_logprobs: list[float | None]
    tokens: list[str] | None = None


class ServerChoice(BaseModel):
    """The only choice of a response."""

    prompt_logprobs: list[dict[int, TokenEntry] | None] | None = None
    logprobs: EchoedTokens | None = None


class ServerCompletion(BaseModel):
    """A response."""

    choices: list[ServerChoice]


def checked_log_prob(log_prob: float | None) -> float:
    """Return a log-prob of at most 0. Raises `ValueError` if it is not one."""
    if log_prob is None or not math.isfinite(log_prob) or log_prob > 1e-3:
        raise ValueError(f"{log_prob} is not a log-prob")
    return min(log_prob, 0.0)


def problem_of(error: ValidationError | IndexError) -> str:
    """Describe the first problem of a response."""
    if not isinstance(error, ValidationError):
        return "choices is empty"
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
