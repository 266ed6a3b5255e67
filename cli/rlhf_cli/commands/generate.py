"""`rlhf generate`: let a model answer."""

from __future__ import annotations

import click

from ..output import echo, print_json
from .sampling import SamplingRequest, sampling_options


@click.command("generate")
@click.option("--model", required=True, metavar="DIR", help="Model folder, hub name or builtin:NAME.")
@click.option("--prompt", "prompts", required=True, multiple=True, metavar="TEXT", help="What to answer. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of prompt and completion.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling.")
@sampling_options
def generate(model: str, prompts: tuple[str, ...], as_json: bool, seed: int, sampling: SamplingRequest) -> None:
    """Print a model's answer to each prompt, one after the other.

    \b
    Examples:
      rlhf generate --model runs/first/model --prompt "31524>"
      rlhf generate --model runs/first/model --prompt "Hello" --temperature 0.8 --seed 3
    """
    from rlhf_core.entry.inference import generate_text

    answers = generate_text(
        model,
        list(prompts),
        engine=sampling.engine,
        sampling=sampling.params(),
        seed=seed,
        device=sampling.device,
    )
    if as_json:
        print_json([{"prompt": p, "completion": a} for p, a in zip(prompts, answers, strict=True)])
        return
    for answer in answers:
        echo(answer)
