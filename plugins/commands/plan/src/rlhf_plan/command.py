"""`rlhf plan`: estimates the memory of a run before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun
    from rlhf_core.wiring import RunInputs

    from . import Layout


def _bytes(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Parse a size with its unit into bytes."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = None if value is None else int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        size = 0
    if size == 0:
        raise click.BadParameter(f"{value!r} is not a size above 0, such as 24GB or 80GiB")
    return size


@click.command("plan")
@click.option("--num-processes", type=click.IntRange(min=1), default=1, show_default=True, help="Training processes.")
@click.option(
    "--memory",
    metavar="SIZE",
    callback=_bytes,
    help="Memory of one process (24GB, 80GiB), to find the smallest layout that fits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    run: Callable[[int], tuple[ResolvedRun, RunInputs]], num_processes: int, memory: int | None, as_json: bool
) -> None:
    """Estimate the memory of a run by part and process.

    Only the model's config is read. Code files that the run names are not executed. Answers are assumed to have the
    length engine.max_new_tokens. On a machine without a GPU, --set model.device=cuda plans a run on GPUs.

    \b
    Examples:
      rlhf plan run.yaml
      rlhf plan run.yaml --strategy fsdp --num-processes 8 --json
      rlhf plan run.yaml --strategy fsdp --memory 24GB --set model.device=cuda
    """
    from . import plan_run

    resolved, inputs = run(num_processes)
    estimate = plan_run(resolved, inputs, num_processes, memory_bytes=memory)
    if as_json:
        click.echo(json.dumps(estimate.to_json(), indent=2))
        return
    is_cpu = estimate.device == "cpu" and resolved.run.model.device == "auto"
    gpu_hint = " (for GPUs: --set model.device=cuda)" if is_cpu else ""
    _echo(
        f"{estimate.num_parameters:,} parameters, {estimate.num_trainable:,} trained, "
        f"{estimate.tokens_per_sample:.0f} tokens per sample, on {estimate.device}{gpu_hint}\n"
    )
    rows = [["PROCESS", "MEMORY", "PEAK"]]
    for process in estimate.processes:
        name = f"{process.kind} x {process.count}"
        rows += [[name, part, _size(size)] for part, size in process.bytes_by_part.items()]
        rows.append([name, "total", _size(process.total_bytes)])
    _print_table(rows)
    if estimate.layout is not None:
        _echo("\n" + _describe_layout(estimate.layout, resolved))


def _describe_layout(layout: Layout, resolved: ResolvedRun) -> str:
    """Return two lines: the layout that fits, and the flags that select it."""
    largest, memory = layout.largest, _size(layout.memory_bytes)
    if not layout.fits:
        part = max(largest.bytes_by_part, key=lambda part: largest.bytes_by_part[part])
        hint = (
            "a strategy that shards the model needs less memory per process: --strategy fsdp"
            if resolved.strategy.component.max_processes is not None
            else "separate makers (--transport ray) remove the policy's copy from the trainers"
            if part == "policy copy of the engine"
            else "docs/memory.md explains how to make a run smaller"
        )
        return (
            f"no layout of strategy {resolved.strategy.name} fits {memory} per process: a {largest.kind} of "
            f"{layout.num_processes} needs {_size(largest.total_bytes)}, mostly for {part}\n  {hint}"
        )
    own = resolved.own_processes
    flags = [f"--num-processes {layout.num_processes}"] if own is None else []
    settings = {} if own is None else {f"transport.{own.option}": layout.num_processes}
    settings |= {f"strategy.{key}": value for key, value in layout.options.items()}
    flags += [f"--set {key}={json.dumps(value)}" for key, value in settings.items()]
    return (
        f"the smallest layout for {memory} per process: {layout.num_processes} training "
        f"{'process' if layout.num_processes == 1 else 'processes'}, at most {_size(largest.total_bytes)} each\n"
        f"  {' '.join(flags)}"
    )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _echo(text: str) -> None:
    """Print text with control characters escaped, since names of plugins and options are untrusted."""
    from rlhf_core.util import printable

    click.echo(printable(text))
