"""`rlhf plan`: memory, throughput and time of a run, before it is started."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ..output import echo, print_json, print_table
from ..progress import clock
from ..run_arguments import RunArguments, run_options, tell_dropped, tell_unread

if TYPE_CHECKING:
    from rlhf_core.config.resolve import ResolvedRun
    from rlhf_core.plan import Layout, Plan


class Memory(click.ParamType[int]):
    """A size with its unit, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from pydantic import ByteSize, TypeAdapter, ValidationError

        try:
            size = int(TypeAdapter(ByteSize).validate_python(value))
        except ValidationError:
            self.fail(f"{value!r} is no size; say it like 24GB or 80GiB", param, ctx)
        if size < 1:
            self.fail(f"{value!r} is not above 0", param, ctx)
        return size


@click.command("plan")
@run_options
@click.option("--num-processes", type=click.IntRange(min=1), default=1, show_default=True, help="Training processes.")
@click.option(
    "--memory", type=Memory(), help="Memory of one process (24GB, 80GiB): say which is the smallest layout that fits."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(request: RunArguments, num_processes: int, memory: int | None, as_json: bool) -> None:
    """Estimate what a run will need: memory by part and process, tokens a second, time to the end.

    Only the model's config is read, and this machine's speed measured for a moment; files of code that the run names
    are read, not run. Answers are taken to be as long as engine.max_new_tokens allows, so that most runs end earlier.
    On a machine without a GPU, --set model.device=cuda plans the memory of a run on GPUs.

    \b
    Examples:
      rlhf plan run.yaml
      rlhf plan run.yaml --strategy fsdp --num-processes 8 --json
      rlhf plan run.yaml --strategy fsdp --memory 24GB --set model.device=cuda
    """
    from rlhf_core.config.named_functions import NamesFunctions, without_files
    from rlhf_core.config.processes import check_groups, check_processes
    from rlhf_core.config.resolve import resolve
    from rlhf_core.entry.train import check_run
    from rlhf_core.errors import ConfigError
    from rlhf_core.plan import plan_run
    from rlhf_core.plugins.trust import NO_FILE

    mapping, dropped = request.mapping()
    tell_dropped(dropped)
    resolved = resolve(mapping, where=request.where, trust=NO_FILE)
    tell_unread(resolved)
    if resolved.run.model.trust_remote_code:
        raise ConfigError("is set, but a plan runs no code that comes with a model", where="model.trust_remote_code")
    _refuse_files(resolved)
    if isinstance(resolved.algorithm.config, NamesFunctions):
        config = without_files(resolved.algorithm.config)
        resolved = replace(resolved, algorithm=replace(resolved.algorithm, config=config))
    check_processes(resolved, num_processes)
    check_groups(resolved, num_processes)
    found = plan_run(resolved, check_run(resolved), num_processes, memory_bytes=memory)
    if as_json:
        print_json(found.to_json())
        return
    is_cpu = found.device == "cpu" and resolved.run.model.device == "auto"
    other = " (of GPUs: --set model.device=cuda)" if is_cpu else ""
    echo(
        f"{found.num_parameters:,} parameters, {found.num_trainable:,} trained; "
        f"{found.tokens_per_sample:.0f} tokens a sample; on {found.device}{other}\n"
    )
    rows = []
    for process in found.processes:
        name = f"{process.kind} x {process.count}"
        rows += [[name, part, _size(size)] for part, size in process.bytes_by_part.items()]
        rows.append([name, "together", _size(process.total_bytes)])
    print_table(["process", "memory", "peak"], rows)
    echo("")
    if not found.seconds_per_episode:
        echo("no times: there is no GPU here to measure")
    else:
        _print_times(found)
    if found.layout is not None:
        echo("\n" + _layout(found.layout, resolved))


def _refuse_files(resolved: ResolvedRun) -> None:
    """Raise `ConfigError` where a file would have to be run: an algorithm, a source of prompts, or one's filter."""
    from rlhf_core.errors import ConfigError
    from rlhf_core.plugins.trust import referenced_files

    run = resolved.to_mapping()
    evaluation = run["eval"] or {"prompts": None, "sets": {}}
    sections = {"algorithm": run["algorithm"]["name"], "prompts": run["prompts"], "eval.prompts": evaluation["prompts"]}
    sections |= {f"eval.sets.{name}.prompts": each["prompts"] for name, each in evaluation["sets"].items()}
    for place, section in sections.items():
        if files := sorted(map(str, referenced_files(section))):
            raise ConfigError(
                f"a plan runs no code from files, and it names {files[0]}",
                where=place,
                hint=f"plan with one that is installed and needs as much: --set {place}=NAME; without a filter: "
                f"--set {place}.filter=null",
            )


def _print_times(found: Plan) -> None:
    phases = [[phase, f"{seconds:.2f} s", _rate(found.tokens_per_second.get(phase))]
              for phase, seconds in found.seconds_per_episode.items()]  # fmt: skip
    print_table(["phase", "an episode", "tokens a second"], phases)
    total = clock(found.total_seconds) if found.total_seconds >= 1 else "a second"
    echo(f"\nat most about {total}, without rewards, evaluation and checkpoints")


def _layout(layout: Layout, resolved: ResolvedRun) -> str:
    """Two lines: what fits, and how to ask for it."""
    from rlhf_core.config.processes import other_strategies

    largest, memory = layout.largest, _size(layout.memory_bytes)
    if not layout.fits:
        part = max(largest.bytes_by_part, key=lambda part: largest.bytes_by_part[part])
        most = resolved.strategy.component.max_processes
        hint = (
            other_strategies(2)
            if most is not None
            else "makers of their own (--transport ray) take the policy's copy out of the trainers"
            if part == "policy copy of the engine"
            else "docs/memory.md says what makes a run smaller"
        )
        return (
            f"no layout of strategy {resolved.strategy.name} fits {memory} a process: a {largest.kind} of "
            f"{layout.num_processes} needs {_size(largest.total_bytes)}, most of all {part}\n  {hint}"
        )
    own = resolved.own_processes
    flags = [f"--num-processes {layout.num_processes}"] if own is None else []
    settings = {} if own is None else {f"transport.{own.option}": layout.num_processes}
    settings |= {f"strategy.{key}": value for key, value in layout.options.items()}
    flags += [f"--set {key}={json.dumps(value)}" for key, value in settings.items()]
    return (
        f"the smallest layout for {memory} a process: {layout.num_processes} training "
        f"{'process' if layout.num_processes == 1 else 'processes'}, at most {_size(largest.total_bytes)} each\n"
        f"  {' '.join(flags)}"
    )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"
