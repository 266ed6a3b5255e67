"""`rlhf serve-training`: training as a service, for the tinker SDK."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

import click

_KEY = "RLHF_SERVE_TRAINING_KEY"


@click.command("serve-training")
@click.option(
    "--base", required=True, metavar="MODEL", help="Model folder, hub name or builtin: name to train adapters of."
)
@click.option(
    "--output", required=True, metavar="DIR", help="Folder of states and checkpoints. A restart continues it."
)
@click.option("--num-processes", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks.")
@click.option(
    "--strategy", default="single", show_default=True, help="single, torch-ddp, ddp, fsdp, gemini or low-level-zero."
)
@click.option("--engine", default="hf", show_default=True, help="Engine that samples.")
@click.option(
    "--transport",
    default="local",
    show_default=True,
    help="Where ranks run: local (this machine), or ray (rank 0 here, the others on a cluster).",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 selects a free port.")
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    metavar="NAME=VARIABLE",
    help="A tenant, and the environment variable with its key (tml-…). Without it, one tenant with a new key.",
)
@click.option(
    "--max-rank", type=click.IntRange(min=1), default=32, show_default=True, help="Largest rank of an adapter."
)
@click.option(
    "--max-adapters", type=click.IntRange(min=1), help="Adapters in memory: 16, or 1 with gemini and low-level-zero."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="strategy.…, engine.…, model.…, transport.… or limits.… (repeatable).",
)
@click.option("--plan", "only_plan", is_flag=True, help="Print the memory and disk that it needs, and exit.")
def serve_training(
    base: str,
    output: str,
    num_processes: int,
    strategy: str,
    engine: str,
    transport: str,
    host: str,
    port: int,
    tenants: tuple[str, ...],
    max_rank: int,
    max_adapters: int | None,
    seed: int,
    device: str,
    changes: tuple[str, ...],
    only_plan: bool,
) -> None:
    """Train and sample LoRA adapters of a model for clients of the tinker SDK.

    A client sets TINKER_BASE_URL to the printed address and TINKER_API_KEY to its key. See docs/serve-training.md.

    \b
    Examples:
      rlhf serve-training --base ./my-model --output service
      rlhf serve-training --base ./my-model --output service --strategy fsdp --num-processes 4
      rlhf serve-training --base ./my-model --output service --strategy fsdp --num-processes 8 --transport ray \\
        --set transport.address=auto --set transport.trainer_gpus=1
      rlhf serve-training --base ./my-model --output service --tenant alice=ALICE_KEY --tenant bob=BOB_KEY
      rlhf serve-training --base ./my-model --output service --plan
    """
    from rlhf_core.util import set_up_host_memory

    set_up_host_memory()  # before torch is imported
    from .launchers import launcher_of
    from .options import OWNING, WorkerOptions, check_strategy
    from .planning import plan_lines
    from .running import ServeOptions, run
    from .settings import parse_settings, parse_tenants

    settings = parse_settings(changes)
    worker: dict[str, Any] = {
        "base": base,
        "strategy": strategy,
        "strategy_options": settings.strategy,
        "engine": engine,
        "engine_options": settings.engine,
        "device": device,
        "max_rank": max_rank,
        "max_adapters": max_adapters or (1 if strategy in OWNING else 16),
        "seed": seed,
        **settings.model,
    }
    checked = WorkerOptions(**worker)
    check_strategy(checked, num_processes)
    launcher = launcher_of(transport, settings.transport)
    if only_plan:
        for line in plan_lines(checked, num_processes, settings.limits):
            click.echo(line)
        return
    named = parse_tenants(tenants) or _default_tenant()
    options = ServeOptions(worker=worker, output=output, host=host, port=port, tenants=named, limits=settings.limits)
    run(options, num_processes, launcher)
    click.echo("stopped")


def _default_tenant() -> dict[str, str]:
    """The only tenant without `--tenant`. Its key is created and printed if the environment lacks it."""
    from rlhf_core.errors import UserInputError

    if _KEY not in os.environ:
        if not sys.stderr.isatty():
            raise UserInputError(
                "a key must not be written to a log, and stderr is not a terminal to print it to",
                where="rlhf serve-training",
                hint=f"export {_KEY}=tml-$(openssl rand -hex 24)",
            )
        os.environ[_KEY] = f"tml-{secrets.token_hex(24)}"
        click.echo(f"key: {os.environ[_KEY]}", err=True)
    return {"default": _KEY}
