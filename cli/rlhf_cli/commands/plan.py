"""`rlhf plan`: memory, throughput and time of a run, before it is started."""

from __future__ import annotations

from dataclasses import replace

import click

from ..output import echo, print_json, print_table
from ..progress import clock
from ..run_arguments import RunArguments, run_options, tell_dropped, tell_unread


@click.command("plan")
@run_options
@click.option("--num-processes", type=click.IntRange(min=1), default=1, show_default=True, help="Training processes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(request: RunArguments, num_processes: int, as_json: bool) -> None:
    """Estimate what a run will need: memory by part and process, tokens a second, time to the end.

    Only the model's config is read, and this machine's speed measured for a moment; files of code that the run names
    are read, not run. Answers are taken to be as long as engine.max_new_tokens allows, so that most runs end earlier.

    \b
    Examples:
      rlhf plan run.yaml
      rlhf plan run.yaml --strategy fsdp --num-processes 8 --json
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
    sections = {"algorithm": resolved.algorithm, "prompts": resolved.prompts, "eval.prompts": resolved.eval_prompts}
    for place, section in sections.items():
        if section is not None and section.unread is not None:
            raise ConfigError(
                f"a plan runs no code from files, and {section.name} is one",
                where=place,
                hint=f"plan with one that is installed and needs as much: --set {place}=NAME",
            )
    if isinstance(resolved.algorithm.config, NamesFunctions):
        config = without_files(resolved.algorithm.config)
        resolved = replace(resolved, algorithm=replace(resolved.algorithm, config=config))
    check_processes(resolved, num_processes)
    check_groups(resolved, num_processes)
    found = plan_run(resolved, check_run(resolved), num_processes)
    if as_json:
        print_json(found.to_json())
        return
    echo(
        f"{found.num_parameters:,} parameters, {found.num_trainable:,} trained; "
        f"{found.tokens_per_sample:.0f} tokens a sample; on {found.device}\n"
    )
    rows = []
    for process in found.processes:
        name = f"{process.kind} x {process.count}"
        rows += [[name, part, _size(size)] for part, size in process.bytes_by_part.items()]
        rows.append([name, "together", _size(process.total_bytes)])
    print_table(["process", "memory", "peak"], rows)
    echo("")
    phases = [[phase, f"{seconds:.2f} s", _rate(found.tokens_per_second.get(phase))]
              for phase, seconds in found.seconds_per_episode.items()]  # fmt: skip
    print_table(["phase", "an episode", "tokens a second"], phases)
    echo(f"\nat most about {clock(found.total_seconds)}, without rewards, evaluation and checkpoints")


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"
