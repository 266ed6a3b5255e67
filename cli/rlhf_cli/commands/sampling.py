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
    click.option("--engine", metavar="NAME", default="hf", show_default=True, help="How answers are generated."),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=128,
        show_default=True,
        help="Most tokens of an answer.",
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="0 is greedy decoding; above 0 samples.",
    ),
    click.option("--top-k", type=click.IntRange(min=0), default=0, help="Likeliest tokens only; 0: off."),
    click.option(
        "--top-p",
        type=click.FloatRange(min=0, max=1, min_open=True),
        default=1.0,
        show_default=True,
        help="Probability of the tokens sampled from; 1 is off.",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends an answer. Repeatable."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Sampling options given on the command line."""

    engine: str
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: tuple[str, ...]
    device: str

    def params(self) -> SamplingParams:
        """Sampling parameters for an engine; temperature 0 is greedy."""
        from rlhf_core.types import SamplingParams

        greedy = self.temperature == 0
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=1.0 if greedy else self.temperature,
            top_k=0 if greedy else self.top_k,
            top_p=1.0 if greedy else self.top_p,
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
