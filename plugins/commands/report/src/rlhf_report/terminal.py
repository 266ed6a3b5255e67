"""Terminal output of the commands. Run folders are untrusted, so their control characters are escaped."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from rlhf_core.util import printable, redact_text


def echo(text: str) -> None:
    """Print text to stdout with control characters escaped and secrets removed."""
    click.echo(printable(redact_text(text)))


def heading(text: str, *, bold: bool = False, dim: bool = False) -> None:
    """Print a line, styled if stdout is a terminal."""
    plain = printable(text)
    click.echo(click.style(plain, bold=bold, dim=dim) if sys.stdout.isatty() else plain)


def print_json(value: Any) -> None:
    """Print indented JSON to stdout, with JSON escapes for non-ASCII characters."""
    click.echo(redact_text(json.dumps(value, indent=2)).replace("\x7f", "\\u007f"))
