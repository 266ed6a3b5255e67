"""`rlhf generate`: let a model answer."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from ..output import echo, heading, print_json
from .sampling import SamplingRequest, sampling_options

if TYPE_CHECKING:
    from rlhf_core.config.resolved import Configured


@click.command("generate")
@click.option("--model", required=True, metavar="DIR", help="Model folder, hub name or builtin:NAME.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="What to answer. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of prompt and completion, or of episodes.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling.")
@click.option("--environment", metavar="NAME", help="Play episodes of this environment: NAME or FILE.py:CLASS.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="environment.KEY=VALUE",
    help="Set an option of the environment, the value in YAML: --set environment.max_turns=4. Repeatable.",
)
@sampling_options
def generate(
    model: str,
    prompts: tuple[str, ...],
    as_json: bool,
    seed: int,
    environment: str | None,
    overrides: tuple[str, ...],
    sampling: SamplingRequest,
) -> None:
    """Print a model's answer to each prompt, one after the other; or, in an environment, an episode turn by turn.

    \b
    Examples:
      rlhf generate --model runs/first/model --prompt "31524>"
      rlhf generate --model runs/first/model --prompt "Hello" --temperature 0.8 --seed 3
      rlhf generate --model runs/game/model --environment guess-number --seed 3
    """
    sections = _sections(environment, overrides)
    if not sections and not prompts:
        raise click.UsageError('say what to answer: --prompt "…"; or where to act: --environment NAME')
    from ..answers import generate_answers

    lines = generate_answers(
        model,
        prompts,
        sections,
        engine=sampling.engine or "hf",
        sampling=sampling.params(),
        seed=seed,
        device=sampling.device or "auto",
    )
    if sections:
        print_json(lines) if as_json else _print_episodes(lines)
    elif as_json:
        print_json([{"prompt": p, "completion": line["completion"]} for p, line in zip(prompts, lines, strict=True)])
    else:
        for line in lines:
            echo(line["completion"])


def _sections(name: str | None, overrides: tuple[str, ...]) -> dict[str, Configured]:
    """The environment with its options; nothing where none was requested. Raises `ConfigError`."""
    from rlhf_core.config.load import load_run
    from rlhf_core.config.problems import Problems
    from rlhf_core.config.resolve import resolve_section

    if name is None:
        if overrides:
            raise click.UsageError("--set is for options of an environment: name it with --environment")
        return {}
    run = load_run({"environment": {"name": name}}, overrides)
    others = sorted(set(run) - {"environment"})
    if others:
        raise click.UsageError(f"--set {others[0]}…: only options of the environment are set here")
    problems = Problems()
    environment = resolve_section("environment", run["environment"], problems)
    problems.raise_if_any("--environment")
    return {} if environment is None else {"environment": environment}


def _print_episodes(played: list[dict[str, Any]]) -> None:
    for row in played:
        rewards = "  ".join(f"{name} {value:.4g}" for name, value in row["rewards"].items())
        # The rewards are the episode's: they stand above its first branch, and only there.
        begins = f"branch {row['branch']}" if row["branch"] else f"reward: {rewards}"
        heading(f"{begins}  {row['num_tokens']} tokens  {row['finish_reason']}", dim=True)
        echo(indent(row["prompt"], "  > "))
        for turn in row["turns"]:
            echo(f"  {turn['role']}")
            echo(indent(turn["text"], "    " if turn["role"] == "policy" else "  > "))
