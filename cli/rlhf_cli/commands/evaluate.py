"""`rlhf eval`: score a model on a file of prompts, in an environment, or like the evaluation of a run file."""

from __future__ import annotations

from typing import Any

import click

from ..numbers import readable
from ..output import print_json, print_table
from ..run_arguments import RunArguments
from .sampling import MAX_NEW_TOKENS, sampling_options

_TASKS = 64
"""Number of episodes if neither prompts nor a number is specified."""
_EVERYTHING = 2**31
"""A limit that no prompt exceeds."""


@click.command("eval")
@click.argument("run_file", metavar="[RUN.yaml]", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--model", metavar="DIR", help="Model folder, hub name or builtin:NAME.  [default: the run file's]")
@click.option(
    "--prompts",
    "prompts_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON Lines: prompt, optional answer, any metadata. Optional with --environment.",
)
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="NAME[:WEIGHT]",
    help="A reward, or FILE.py:FUNCTION[:WEIGHT]. Repeatable.  [default: the run file's, or exact-match]",
)
@click.option("--environment", metavar="NAME", help="Play episodes of this environment: NAME or FILE.py:CLASS.")
@click.option("--num-prompts", type=click.IntRange(min=1), help="Number of prompts.  [default: all, or 64 tasks]")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY.PATH=VALUE",
    help="Set any option, the value in YAML: --set eval.samples_per_prompt=8 --set rewards.0.pattern=yes.",
)
@click.option("--trust", "trusts", is_flag=True, help="Run code files outside the run file's folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@sampling_options
def evaluate(
    run_file: str | None,
    model: str | None,
    prompts_file: str | None,
    rewards: tuple[str, ...],
    environment: str | None,
    num_prompts: int | None,
    overrides: tuple[str, ...],
    trusts: bool,
    as_json: bool,
    engine: str | None,
    max_new_tokens: int | None,
    temperature: float | None,
    device: str | None,
) -> None:
    """Answer held-out prompts and print the mean of every reward, and the weighted score.

    The prompts are those of a file, tasks that an environment makes itself, or the evaluation prompts of a run file:
    its held-out prompts, `eval.prompts` and `eval.sets`.

    \b
    Examples:
      rlhf eval --model runs/first/model --prompts test.jsonl
      rlhf eval --model runs/first/model --prompts test.jsonl --reward ./my_reward.py:brevity --num-prompts 100
      rlhf eval --model runs/first/model --prompts test.jsonl --reward regex --set rewards.0.pattern="[0-9]+"
      rlhf eval --model runs/game/model --environment guess-number --set environment.max_turns=4 --num-prompts 200
      rlhf eval run.yaml --model runs/first/model --set eval.samples_per_prompt=8
    """
    if run_file is None and model is None:
        raise click.UsageError("specify a model: --model DIR, or a run file")
    if run_file is None and prompts_file is None and environment is None:
        raise click.UsageError("specify prompts (--prompts FILE or a run file) or an environment (--environment NAME)")
    request = RunArguments(
        run_file=run_file,
        rewards=rewards,
        environment=environment,
        model=model,
        overrides=overrides,
        base=_base(num_prompts or _TASKS),
    )
    from ..answers import evaluate_run

    flags = {
        "engine.name": engine,
        "engine.max_new_tokens": max_new_tokens,
        "eval.temperature": temperature,
        "eval.num_prompts": num_prompts,
        "model.device": device,
    }
    settings: list[tuple[str, Any]] = [(key, value) for key, value in flags.items() if value is not None]
    if prompts_file is not None:
        limit = {"max_prompt_tokens": _EVERYTHING}
        settings.append(("eval.prompts", {"name": "jsonl", "path": prompts_file, **limit}))
    if model is not None:
        settings.append(("model.lora", None))  # a trained model's adapter is merged into it
    mapping, _ = request.mapping(settings)
    scores = evaluate_run(mapping, where=request.where, trust=request.trust(everything=trusts))
    if run_file is None:
        scores = {name.removeprefix("eval/"): value for name, value in scores.items()}
    if as_json:
        print_json(scores)
        return
    print_table(["metric", "value"], [[name, readable(value, name)] for name, value in scores.items()])


def _base(num_tasks: int) -> dict[str, Any]:
    """Return a run that evaluates all prompts of a file or, if no file is named, `num_tasks` tasks without prompts."""
    tasks = {"name": "tasks", "size": num_tasks}
    engine = {"max_new_tokens": MAX_NEW_TOKENS}
    return {"prompts": tasks, "eval": {"prompts": tasks, "num_prompts": _EVERYTHING}, "engine": engine}
