"""Command output: tables on a terminal, and complete plain lines in a pipe."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import click

from rlhf_core.util.redact import is_hostile, printable, redact_text


def echo(text: str, *, err: bool = False, newline: bool = True) -> None:
    """Print text on stdout (or stderr) with secrets removed and control characters escaped (it may be model output)."""
    click.echo(printable(redact_text(text)), err=err, nl=newline)


def heading(text: str, *, bold: bool = False, dim: bool = False) -> None:
    """Print a line that is styled on a terminal."""
    plain = printable(text)
    click.echo(click.style(plain, bold=bold, dim=dim) if sys.stdout.isatty() else plain)


class PipeSafeStream:
    """A text stream that discards its output once its reader has closed the pipe or terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with ignore_closed_pipe(self._stream):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with ignore_closed_pipe(self._stream):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def ignore_closed_pipe(stream: TextIO) -> Iterator[None]:
    """Context for writes to `stream`. If its reader has closed it, this write and all later ones are discarded."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """Discard all further output to `stream`, including that at process exit."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, stream.fileno())
    os.close(null_device)


def print_json(value: Any) -> None:
    """Print indented JSON on stdout. Control characters in strings become JSON escapes."""
    click.echo(json_text(value))


def json_text(value: Any) -> str:
    """Return indented JSON with secrets removed. Control characters in strings become JSON escapes."""
    text = redact_text(json.dumps(value, indent=2, ensure_ascii=False))
    return "".join(_json_escape(char) if is_hostile(char) else char for char in text)


def _json_escape(char: str) -> str:
    """Return `\\uXXXX`, or two of them for a character beyond 16 bits. `json.dumps` does not escape DEL."""
    units = char.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[start]:02x}{units[start + 1]:02x}" for start in range(0, len(units), 2))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, otherwise complete lines with columns two spaces apart."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False)
        for header in headers:
            table.add_column(header, overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        Console().print(table)
        return
    lines = [[header.upper() for header in headers], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
