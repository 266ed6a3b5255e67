"""`rlhf generate`: print answers of a model."""

from __future__ import annotations

import json
from textwrap import indent
from typing import Any

import click

from ..output import echo, heading, print_json
from .sampling import MAX_NEW_TOKENS, sampling_options


@click.command("generate")
@click.option("--model", required=True, metavar="DIR", help="Model folder, hub name or builtin:NAME.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Prompt to answer. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of prompt and completion, or of episodes.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling.")
@click.option("--environment", metavar="NAME", help="Play episodes of this environment: NAME or FILE.py:CLASS.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY.PATH=VALUE",
    help="Set an option of the engine, model or environment, the value in YAML: --set engine.top_p=0.9. Repeatable.",
)
@sampling_options
def generate(
    model: str,
    prompts: tuple[str, ...],
    as_json: bool,
    seed: int,
    environment: str | None,
    overrides: tuple[str, ...],
    engine: str | None,
    max_new_tokens: int | None,
    temperature: float | None,
    device: str | None,
) -> None:
    """Print a model's answer to each prompt in order or, with --environment, an episode turn by turn.

    \b
    Examples:
      rlhf generate --model runs/first/model --prompt "31524>"
      rlhf generate --model runs/first/model --prompt "Hello" --temperature 0.8 --set engine.top_p=0.9 --seed 3
      rlhf generate --model runs/game/model --environment guess-number --seed 3
    """
    if environment is None and not prompts:
        raise click.UsageError('specify a prompt (--prompt "…") or an environment (--environment NAME)')
    from rlhf_core.config.load import load_run

    from ..answers import generate_answers

    base: dict[str, Any] = {
        "model": {"path": model, "device": device or "auto"},
        "engine": {"name": engine or "hf", "max_new_tokens": max_new_tokens or MAX_NEW_TOKENS},
    }
    run = load_run(base if environment is None else {**base, "environment": {"name": environment}}, overrides)
    if environment is None and "environment" in run:
        raise click.UsageError("--set environment.… needs --environment NAME")
    if others := sorted(set(run) - {*base, "environment"}):
        raise click.UsageError(f"--set {others[0]}…: only options of engine, model and environment can be set here")
    lines = generate_answers(run, prompts, temperature=temperature or 0.0, seed=seed)
    if environment is not None:
        print_json(lines) if as_json else _print_episodes(lines)
    elif as_json:
        print_json([{"prompt": p, "completion": line["completion"]} for p, line in zip(prompts, lines, strict=True)])
    else:
        for line in lines:
            echo(line["completion"])


def _print_episodes(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        rewards = "  ".join(f"{name} {value:.4g}" for name, value in row["rewards"].items())
        # The rewards belong to the episode, so they are printed above its first branch only.
        title = f"branch {row['branch']}" if row["branch"] else f"reward: {rewards}"
        heading(f"{title}  {row['num_tokens']} tokens  {row['finish_reason']}", dim=True)
        echo(indent(row["prompt"], "  > "))
        for turn in row["turns"]:
            reward = turn.get("reward")
            echo(f"  {turn['role']}" + ("" if reward is None else f"  reward {reward:.4g}"))
            echo(indent(turn["text"], "    " if turn["role"] == "policy" else "  > ", lambda _: True))
            for call in turn.get("tool_calls", ()):
                message = f"calls {call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}"
                echo(indent(f"bad call: {call['error']}" if "error" in call else message, "    "))
