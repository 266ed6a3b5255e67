"""What the commands print: run folders are untrusted, so nothing of theirs may act on the terminal."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from rlhf_core.util import printable, redact_text


def echo(text: str) -> None:
    """Print text on stdout, control characters escaped, secrets removed."""
    click.echo(printable(redact_text(text)))


def heading(text: str, *, bold: bool = False, dim: bool = False) -> None:
    """Print a line, styled on a terminal."""
    plain = printable(text)
    click.echo(click.style(plain, bold=bold, dim=dim) if sys.stdout.isatty() else plain)


def print_json(value: Any) -> None:
    """Print indented JSON on stdout, all but ASCII in strings as JSON escapes."""
    click.echo(redact_text(json.dumps(value, indent=2)).replace("\x7f", "\\u007f"))
