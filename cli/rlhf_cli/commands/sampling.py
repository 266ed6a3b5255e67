"""Options of the commands that sample answers. `--set engine.…` sets all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

MAX_NEW_TOKENS = 128
"""The default of `--max-new-tokens`."""
_OPTIONS = (
    click.option("--engine", help="Engine that generates the answers.  [default: hf]"),
    click.option("--max-new-tokens", type=click.IntRange(min=1), help="Maximum tokens of an answer.  [default: 128]"),
    click.option(
        "--temperature", type=click.FloatRange(min=0), help="Sampling temperature. 0 decodes greedily.  [default: 0]"
    ),
    click.option("--device", help="auto, cpu, cuda or cuda:N.  [default: auto]"),
)
FunctionT = TypeVar("FunctionT", bound=Callable[..., None])


def sampling_options(function: FunctionT) -> FunctionT:
    """Add the options to a command. The value of an unset option is None."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
