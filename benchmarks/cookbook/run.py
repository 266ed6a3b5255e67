"""Run a recipe of tinker-cookbook 0.5.8 against `rlhf serve-training`, with another model and other data.

The recipe is unchanged. Two names are replaced, since this needs neither a model hub nor a data hub: the recommended
renderer of the model (`qwen3_instruct`, whose format SmolLM2 shares), and the data sets, by sums and differences of one
digit in the columns that the recipe reads. `rl_basic` fixes batches of 128 groups of 16 answers after an example of 100
tokens, which take hours on a CPU. `RLHF_GROUPS=8x8` replaces these two numbers and leaves out the example. Prompts are
rendered in one thread. See README.md.

    python run.py sl_loop base_url=http://127.0.0.1:8000 model_name=/path/to/SmolLM2 max_steps=20
"""

from __future__ import annotations

import asyncio
import os
import random
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

RENDERER = "qwen3_instruct"
NUM_PROBLEMS, NUM_TEST_PROBLEMS = 4096, 32


def problems(seed: int) -> list[tuple[str, int]]:
    """Return questions and answers: sums and differences of one digit."""
    rng = random.Random(seed)
    found = []
    for _ in range(NUM_PROBLEMS):
        left, right, is_sum = rng.randint(0, 9), rng.randint(0, 9), rng.random() < 0.5
        sign, answer = ("+", left + right) if is_sum else ("-", left - right)
        found.append((f"Calculate {left} {sign} {right}.", answer))
    return found


def load_dataset(path: str, *arguments: Any, **options: Any) -> Any:
    """Stand in for `datasets.load_dataset`: both splits, in the columns of the data set with this name."""
    import datasets

    splits = {}
    for split, seed in (("train", 0), ("test", 1)):
        rows = problems(seed)[: NUM_PROBLEMS if split == "train" else NUM_TEST_PROBLEMS]
        if "gsm8k" in path:
            columns = {"question": [each for each, _ in rows], "answer": [f"#### {each}" for _, each in rows]}
        elif "no_robots" in path:
            columns = {"messages": [_chat(*each) for each in rows]}
        elif "hh-rlhf" in path:
            columns = {
                "chosen": [_dialogue(question, answer) for question, answer in rows],
                "rejected": [_dialogue(question, answer + 1) for question, answer in rows],
            }
        elif "wikitext" in path:
            columns = {"text": _pages(seed)}
        else:
            raise SystemExit(f"no stand-in for the data set {path!r}: add its columns to run.py")
        splits[split] = datasets.Dataset.from_dict(columns)
    split = options.get("split")
    return splits[split] if split in splits else datasets.DatasetDict(splits)


def _chat(question: str, answer: int) -> list[dict[str, str]]:
    """Return a conversation in the form that the other recipes ask for and reward."""
    request = f"{question} Provide a numerical answer without units, written inside \\boxed{{}}."
    return [{"role": "user", "content": request}, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]


def _pages(seed: int) -> list[str]:
    """Lines of words, among them those that the numerics check counts."""
    rng = random.Random(seed)
    words = ["the", "a", "river", "stone", "light", "green", "people", "after", "before", "between", "however"]
    return [" ".join(rng.choice(words) for _ in range(60)) + " ." for _ in range(NUM_PROBLEMS)]


def _dialogue(question: str, answer: int) -> str:
    return f"\n\nHuman: {question}\n\nAssistant: {answer}"


def use_groups(text: str) -> None:
    """Replace the numbers of groups and answers in the batches of `rl_basic`, and leave out its example.

    Args:
        text: GROUPSxANSWERS, such as 8x8.
    """
    from tinker_cookbook.recipes.math_rl import math_env

    groups, answers = map(int, text.split("x"))
    builder = math_env.Gsm8kDatasetBuilder
    changed = {"batch_size": groups, "group_size": answers, "convo_prefix": None}
    math_env.Gsm8kDatasetBuilder = lambda **options: builder(**{**options, **changed})


class OneThread(asyncio.DefaultEventLoopPolicy):
    """Runs functions for `asyncio.to_thread` one at a time.

    The cookbook renders prompts in threads that share a tokenizer, which transformers changes in each call
    ("Already borrowed").
    """

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a loop with one thread."""
        loop = super().new_event_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        return loop


def main() -> None:
    """Replace the two names, and run the recipe as its own main module."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    recipe = sys.argv.pop(1)
    import datasets
    from tinker_cookbook import model_info

    model_info.get_recommended_renderer_name = lambda *_, **__: RENDERER
    datasets.load_dataset = load_dataset
    asyncio.set_event_loop_policy(OneThread())
    if recipe == "rl_basic" and "RLHF_GROUPS" in os.environ:
        use_groups(os.environ["RLHF_GROUPS"])
    runpy.run_module(f"tinker_cookbook.recipes.{recipe}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
