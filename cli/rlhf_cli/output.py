"""Output for two readers: a terminal gets tables, a pipe gets plain lines that are never cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click


def print_json(value: Any) -> None:
    """Indented JSON on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_yaml(value: Any) -> None:
    """YAML on stdout, keys in their order."""
    from rlhf_core.util.yaml12 import dump_yaml

    click.echo(dump_yaml(value), nl=False)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; otherwise lines whose columns are two spaces apart, whole."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False)
        for header in headers:
            table.add_column(header, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    lines = [[header.upper() for header in headers], *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
