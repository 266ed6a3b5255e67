"""Options of the commands that let a model answer; `--set engine.…` says the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

MAX_NEW_TOKENS = 128
"""The default of `--max-new-tokens`."""
_OPTIONS = (
    click.option("--engine", help="What generates the answers.  [default: hf]"),
    click.option("--max-new-tokens", type=click.IntRange(min=1), help="Most tokens of an answer.  [default: 128]"),
    click.option(
        "--temperature", type=click.FloatRange(min=0), help="0 is greedy decoding; above 0 samples.  [default: 0]"
    ),
    click.option("--device", help="auto, cpu, cuda or cuda:N.  [default: auto]"),
)
FunctionT = TypeVar("FunctionT", bound=Callable[..., None])


def sampling_options(function: FunctionT) -> FunctionT:
    """Add the options to a command; one that is not given is None."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
