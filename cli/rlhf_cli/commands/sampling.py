"""Options of the commands that let a model answer: how it samples, and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlhf_core.types import SamplingParams

_OPTIONS = (
    click.option("--engine", metavar="NAME", help="How answers are generated.  [default: hf]"),
    click.option("--max-new-tokens", type=click.IntRange(min=1), help="Most tokens of an answer.  [default: 128]"),
    click.option(
        "--temperature", type=click.FloatRange(min=0), help="0 is greedy decoding; above 0 samples.  [default: 0]"
    ),
    click.option("--top-k", type=click.IntRange(min=0), help="Likeliest tokens only.  [default: 0, off]"),
    click.option(
        "--top-p",
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="Probability of the tokens sampled from.  [default: 1, off]",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends an answer. Repeatable."),
    click.option("--device", help="auto, cpu, cuda or cuda:N.  [default: auto]"),
)
MAX_NEW_TOKENS = 128
"""The default of `--max-new-tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Sampling options given on the command line; None where one was not given."""

    engine: str | None
    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    stop: tuple[str, ...]
    device: str | None

    def params(self) -> SamplingParams:
        """Sampling parameters for an engine; temperature 0 is greedy."""
        from rlhf_core.types import SamplingParams

        greedy = not self.temperature
        return SamplingParams(
            max_new_tokens=self.max_new_tokens or MAX_NEW_TOKENS,
            temperature=self.temperature or 1.0,
            top_k=0 if greedy else self.top_k or 0,
            top_p=1.0 if greedy else self.top_p or 1.0,
            stop=self.stop,
            greedy=greedy,
        )


def sampling_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as its `sampling`."""
    names = [each.name for each in fields(SamplingRequest)]

    @wraps(function)
    def with_sampling(**values: Any) -> None:
        sampling = SamplingRequest(**{name: values.pop(name) for name in names})
        function(sampling=sampling, **values)

    for option in reversed(_OPTIONS):
        with_sampling = option(with_sampling)
    return with_sampling
