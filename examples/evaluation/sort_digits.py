"""For Inspect: the answer must be exactly right."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def sort_digits() -> Task:
    """Eight digits and `>`. The target is the same digits in order."""
    return Task(
        dataset=json_dataset(
            str(Path(__file__).with_name("sort-digits.jsonl")), FieldSpec(input="prompt", target="answer")
        ),
        solver=generate(),
        scorer=exact(),
        config=GenerateConfig(max_tokens=12),
    )
