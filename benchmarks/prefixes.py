"""Speedup of the engine `hf` from computing shared prefixes once: prompts of groups, and earlier turns of episodes.

    python benchmarks/prefixes.py [--rounds 5]

Compares many answers to one prompt, prefilled once or for each, and episodes of several turns, with and without the
cache of earlier turns. Both must produce the same samples. Figures are medians of interleaved rounds. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from rlhf_core.components import EngineContext
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine
from rlhf_hf.rows import DecodingRow, make_rows
from rlhf_testing.models import tiny_model, tiny_tokenizer

Samples = dict[int, tuple[int, ...]]
PROMPT, ANSWERS = 256, 16
EPISODES, TURNS, TURN, OBSERVATION = 16, 6, 24, 24


def engine(**options: int) -> HfEngine:
    """Engine over a Llama of 5.3M parameters that never ends an answer by itself."""
    tokenizer = tiny_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ")
    tokenizer.eos_token = None
    model = tiny_model(tokenizer, hidden_size=256, num_layers=6, num_heads=4, seed=0)
    model.generation_config.eos_token_id = None
    context = EngineContext(model=model.eval(), tokenizer=tokenizer, device=torch.device("cpu"), seed=0)
    return HfEngine(HfEngineConfig(**options), context)


def answers(made: HfEngine, sampling: SamplingParams, *, shared: bool) -> Samples:
    """Generate all answers to one prompt. With `shared` False, each row's prompt counts as different."""
    prompt = tuple(4 + (7 * i + i * i) % 30 for i in range(PROMPT))
    asked = [GenerationRequest(sample_id=i, prompt_ids=prompt) for i in range(ANSWERS)]
    with nullcontext() if shared else mock.patch("rlhf_hf.running_batch.make_rows", rows_apart):
        found = made.generate(asked, sampling)
    return {each.sample_id: each.token_ids for each in found}


def rows_apart(*arguments: Any, **options: Any) -> list[DecodingRow]:
    """`make_rows` with a different prompt key for each row."""
    rows = make_rows(*arguments, **options)
    for key, row in enumerate(rows):
        row.prompt_key = key
    return rows


def episodes(made: HfEngine, sampling: SamplingParams) -> Samples:
    """Play the turns of episodes, each with all earlier text as its prompt. Return the tokens of all turns by id."""
    asked = [
        GenerationRequest(sample_id=i, prompt_ids=tuple(4 + (i + 3 * k) % 30 for k in range(64)), goes_on=True)
        for i in range(EPISODES)
    ]
    found: Samples = dict.fromkeys(range(EPISODES), ())
    for _ in range(TURNS):
        turn: dict[int, Completion] = {each.sample_id: each for each in made.generate(asked, sampling)}
        found = {key: (*tokens, *turn[key].token_ids) for key, tokens in found.items()}
        told = tuple(5 + i % 20 for i in range(OBSERVATION))
        asked = [
            GenerationRequest(
                sample_id=each.sample_id,
                prompt_ids=(*each.prompt_ids, *turn[each.sample_id].token_ids, *told),
                offset=each.offset + TURN,
                goes_on=True,
            )
            for each in asked
        ]
    made.weights_updated(made.policy_version + 1)  # the next round starts with an empty cache
    return found


def compare(plain: Callable[[], Samples], reused: Callable[[], Samples], rounds: int) -> dict[str, float]:
    """Seconds of both, and the speedup of the second. Raise an error if the samples differ."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        found = []
        for run, measured in zip((plain, reused), seconds, strict=True):
            started = time.perf_counter()
            found.append(run())
            measured.append(time.perf_counter() - started)
        if found[0] != found[1]:
            raise AssertionError("the samples differ")
    before, after = (statistics.median(measured[1:]) for measured in seconds)  # the first round is warm-up
    return {"seconds": round(before, 3), "seconds_reused": round(after, 3), "ratio": round(before / after, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    made, fresh = engine(), engine(prefix_cache_tokens=0)
    found = {}
    for length in (16, 64):
        sampling = SamplingParams(max_new_tokens=length)
        found[f"{ANSWERS} answers of {length} tokens"] = compare(
            lambda sampling=sampling: answers(made, sampling, shared=False),
            lambda sampling=sampling: answers(made, sampling, shared=True),
            rounds,
        )
    sampling = SamplingParams(max_new_tokens=TURN)
    found[f"{EPISODES} episodes of {TURNS} turns"] = compare(
        lambda: episodes(fresh, sampling), lambda: episodes(made, sampling), rounds
    )
    for case, figures in found.items():
        print(json.dumps({"case": case, **figures}), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
