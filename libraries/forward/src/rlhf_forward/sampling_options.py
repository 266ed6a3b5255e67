"""Options of engines that change the sampled distribution beyond temperature, top-k and top-p. Loads without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, nextafter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from rlhf_core.columns import TEMPERATURE as _TEMPERATURE
from rlhf_core.columns import Column
from rlhf_core.config import EngineConfig
from rlhf_core.config.problems import Problem
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.config.resolved import ResolvedRun
    from rlhf_core.types import GenerationRequest, SamplingParams

    from .banned_words import BannedWords

MIN_P = "min_p"
REPETITION = "repetition_penalty"
"""Request option, and column of each token: the penalty (0 is off in the column)."""
TEMPERATURE = _TEMPERATURE
"""Column of each token: the temperature at which it was sampled (0 is the temperature of the run)."""
PRESENCE = "presence_penalty"
"""Request option, and column of each token: the penalty."""
BANNED = "banned_ids"
"""Column of each token: the [K] ids that it could not be, -1 = padding."""
SHAPING_COLUMNS: Mapping[str, Column] = {
    REPETITION: Column(optional=True),
    PRESENCE: Column(optional=True),
    BANNED: Column(dtype="int32", fill=-1, optional=True),
}
"""Columns from which `policy_forward` rebuilds the sampled distribution. Tokens that min-p keeps are in the support."""
_OFF = {MIN_P: 0.0, REPETITION: 1.0, PRESENCE: 0.0}


class ShapedEngineConfig(EngineConfig):
    """Options of an engine that reports penalties and banned tokens as columns, so that the trainer applies them, too.

    Greedy answers (evaluations, baselines) ignore all of them.
    """

    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Sample only tokens with at least this fraction of the most likely token's probability. 0 is off.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description="Divide positive logits, and multiply negative ones, of tokens in the prompt and the answer "
        "so far. 1 is off.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Subtract this from the logits of tokens that the answer contains so far. 0 is off.",
    )
    banned_words: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Words that are never sampled.",
    )

    columns: ClassVar[Mapping[str, Column]] = SHAPING_COLUMNS
    request_options: ClassVar[Mapping[str, str]] = {
        "temperature": "softmax temperature for this request, above 0, instead of engine.temperature",
        MIN_P: "instead of engine.min_p",
        REPETITION: "instead of engine.repetition_penalty",
        PRESENCE: "instead of engine.presence_penalty",
    }

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield problems of `options`, and of options that look at one answer in a run with an environment.

        Args:
            run: The resolved run.
        """
        yield from super().check(run)
        for name in self.options.keys() & _OFF.keys():
            yield Problem(f"options.{name}", "is an option of the section", f"set engine.{name}")
        for name in ("presence_penalty", "banned_words"):
            if getattr(self, name) and run.section("environment") is not None:
                problem = "looks at one answer, but an environment's episode has several turns"
                yield Problem(
                    name, problem, "remove it, or use repetition_penalty, which looks at the whole conversation"
                )

    def min_p_problem(self) -> str | None:
        """Return the reason why requests may not set `min_p`, or None."""
        return None

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of the run's rollouts, with these options as request options."""
        sampling = super().sampling()
        own = {name: value for name, off in _OFF.items() if (value := getattr(self, name)) != off}
        return replace(sampling, options={**own, **sampling.options})


def request_shaping(request: GenerationRequest, *, where: str) -> tuple[float, float, float]:
    """Return `shaping_of` a request.

    Args:
        request: The request.
        where: Location for errors.

    Returns:
        min_p, repetition penalty and presence penalty.

    Raises:
        DataError: An option is not a number in its range, or a turn of an episode has a presence penalty, since the
            trainer knows only whole rows.
    """
    found = shaping_of(request.options, where=where)
    if found[2] != 0.0 and (request.goes_on or request.offset or request.branch):
        problem = "a turn of an episode has a presence_penalty, which looks at one answer"
        raise DataError(problem, where=where, hint="use repetition_penalty, which looks at the whole conversation")
    return found


def shaping_of(options: Mapping[str, Any], *, where: str) -> tuple[float, float, float]:
    """Return min_p, repetition penalty and presence penalty of a request's options.

    Args:
        options: Options of a request.
        where: Location for the error.

    Returns:
        The three numbers, 0, 1 and 0 if they are off.

    Raises:
        DataError: An option is not a number in its range.
    """
    values = {name: options.get(name, off) for name, off in _OFF.items()}
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        low, high, rule = _RANGES[name]
        if not is_number or not low <= value <= high:
            raise DataError(f"the option {name} is {value!r}", where=where, hint=f"use a number {rule}")
    return float(values[MIN_P]), float(values[REPETITION]), float(values[PRESENCE])


def temperature_of(options: Mapping[str, Any], *, where: str) -> float | None:
    """Return the temperature of a request's options, or None if they do not set it.

    Args:
        options: Options of a request.
        where: Location for the error.

    Returns:
        The temperature.

    Raises:
        DataError: It is not a number above 0.
    """
    value = options.get("temperature")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise DataError(f"the option temperature is {value!r}", where=where, hint="use a number above 0")
    return float(value)


def sampled_columns(
    options: Mapping[str, Any], banned: BannedWords | None, token_ids: Sequence[int], *, where: str
) -> dict[str, Any]:
    """Return the columns of an answer from which the trainer rebuilds its distribution, without those that are off.

    Args:
        options: Options of the request.
        banned: The banned words of the run.
        token_ids: The answer.
        where: Location for errors.

    Returns:
        Column -> a value per token.
    """
    _, repetition, presence = shaping_of(options, where=where)
    temperature = temperature_of(options, where=where)
    columns: dict[str, Any] = {}
    if temperature is not None:
        columns["temperature"] = [temperature] * len(token_ids)
    if (repetition, presence) != (1.0, 0.0):
        columns |= {REPETITION: [repetition] * len(token_ids), PRESENCE: [presence] * len(token_ids)}
    if banned is not None:
        columns[BANNED] = [banned.after(token_ids, place) for place in range(len(token_ids))]
    return columns


_RANGES = {
    MIN_P: (0.0, nextafter(1.0, 0.0), "of at least 0 and below 1"),
    REPETITION: (nextafter(0.0, 1.0), inf, "above 0"),
    PRESENCE: (-2.0, 2.0, "from -2 to 2"),
}
