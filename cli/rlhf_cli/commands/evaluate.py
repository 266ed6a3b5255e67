"""`rlhf eval`: score a model's answers to a file of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..output import print_json, print_table
from .sampling import SamplingRequest, sampling_options

if TYPE_CHECKING:
    from rlhf_core.config.resolve import SelectedReward


@click.command("eval")
@click.option("--model", required=True, metavar="DIR", help="Model folder, hub name or builtin:NAME.")
@click.option(
    "--prompts",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON lines: prompt, optional answer, any metadata.",
)
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="NAME[:WEIGHT]",
    default=("exact-match",),
    show_default=True,
    help="A reward, or FILE.py:FUNCTION[:WEIGHT]. Repeatable.",
)
@click.option("--num-prompts", type=click.IntRange(min=1), help="Score the first so many only.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@sampling_options
def evaluate(
    model: str,
    prompts: str,
    rewards: tuple[str, ...],
    num_prompts: int | None,
    as_json: bool,
    sampling: SamplingRequest,
) -> None:
    """Generate an answer to each prompt of a file and print the mean of every reward.

    \b
    Examples:
      rlhf eval --model runs/first/model --prompts test.jsonl
      rlhf eval --model runs/first/model --prompts test.jsonl --reward ./my_reward.py:brevity --num-prompts 100
    """
    selected = _rewards(rewards)

    from rlhf_core.entry.inference import evaluate_folder

    scores = evaluate_folder(
        model,
        prompts,
        selected,
        num_prompts=num_prompts,
        sampling=sampling.params(),
        engine=sampling.engine,
        device=sampling.device,
    )
    if as_json:
        print_json(scores)
        return
    print_table(["metric", "value"], [[name, f"{value:.6g}"] for name, value in scores.items()])


def _rewards(texts: tuple[str, ...]) -> list[SelectedReward]:
    from rlhf_core.config.load import parse_reward
    from rlhf_core.config.problems import Problems
    from rlhf_core.config.resolve import resolve_reward

    problems = Problems()
    found = [resolve_reward(parse_reward(text), problems, text) for text in texts]
    problems.raise_if_any("--reward")
    return [reward for reward in found if reward is not None]
