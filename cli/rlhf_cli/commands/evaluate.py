"""`rlhf eval`: score a model's answers to a file of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..numbers import readable
from ..output import print_json, print_table
from .playing import EnvironmentRequest, environment_options
from .sampling import SamplingRequest, sampling_options

if TYPE_CHECKING:
    from rlhf_core.config.selected import SelectedReward


@click.command("eval")
@click.option("--model", required=True, metavar="DIR", help="Model folder, hub name or builtin:NAME.")
@click.option(
    "--prompts",
    "prompts_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON lines: prompt, optional answer, any metadata. An environment may do without.",
)
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="NAME[:WEIGHT]",
    help="A reward, or FILE.py:FUNCTION[:WEIGHT]. Repeatable.  [default: exact-match; the environment's own]",
)
@click.option(
    "--num-prompts", type=click.IntRange(min=1), help="Score the first so many only.  [default: all; 64 without a file]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@environment_options
@sampling_options
def evaluate(
    model: str,
    prompts_file: str | None,
    rewards: tuple[str, ...],
    num_prompts: int | None,
    as_json: bool,
    sampling: SamplingRequest,
    playing: EnvironmentRequest,
) -> None:
    """Generate an answer to each prompt of a file and print the weighted score and the mean of every reward.

    With --environment, play an episode for each prompt, or for tasks that the environment makes itself, and print
    its reward and metrics, too.

    \b
    Examples:
      rlhf eval --model runs/first/model --prompts test.jsonl
      rlhf eval --model runs/first/model --prompts test.jsonl --reward ./my_reward.py:brevity --num-prompts 100
      rlhf eval --model runs/game/model --environment guess-number --set environment.max_turns=4 --num-prompts 200
    """
    environment = playing.select()
    if prompts_file is None and environment is None:
        raise click.UsageError("say what to answer: --prompts FILE; or where to act: --environment NAME")
    selected = _rewards(rewards or (() if environment is not None else ("exact-match",)))

    from rlhf_core.entry.inference import evaluate_folder

    scores = evaluate_folder(
        model,
        prompts_file,
        selected,
        num_prompts=num_prompts,
        sampling=sampling.params(),
        engine=sampling.engine,
        device=sampling.device,
        environment=environment,
    )
    if as_json:
        print_json(scores)
        return
    rows = [[_called(name, selected), readable(value, name)] for name, value in scores.items()]
    print_table(["metric", "value"], rows)


def _called(name: str, rewards: list[SelectedReward]) -> str:
    """The metric, with the weight of a reward that has one."""
    weight = next((reward.weight for reward in rewards if reward.name == name), 1.0)
    return name if weight == 1 else f"{name} (weight {weight:g})"


def _rewards(texts: tuple[str, ...]) -> list[SelectedReward]:
    from rlhf_core.config.load import parse_reward
    from rlhf_core.config.problems import Problems
    from rlhf_core.config.resolve import resolve_reward

    problems = Problems()
    found = [resolve_reward(parse_reward(text), problems, text) for text in texts]
    problems.raise_if_any("--reward")
    return [reward for reward in found if reward is not None]
