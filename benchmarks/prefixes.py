"""Speedup from computing shared prefixes once, in the engine `hf` and in training.

    python benchmarks/prefixes.py [--rounds 5]
    python benchmarks/prefixes.py --training [--rounds 3] [--prompts 8] [--layers 30] [--threads 2]

Compares many answers to one prompt, prefilled once or for each, and episodes of several turns, with and without the
cache of earlier turns. Both must produce the same samples. Figures are medians of interleaved rounds. The last line is
one JSON object.

With `--training`: scoring (reference or critic) and update of a policy in the shape of SmolLM2-135M with random
weights, with 8 answers to each prompt, as separate rows and with prompts computed once. Both must have the same
log-probs and gradients. Seconds are processor time.
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
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.batching import collate
from rlhf_core.components import EngineContext
from rlhf_core.models.forward_passes import ForwardPasses, applying
from rlhf_core.place import LocalPlace
from rlhf_core.types import BufferItem, Completion, GenerationRequest, SamplingParams
from rlhf_forward import policy_forward
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine
from rlhf_hf.rows import DecodingRow, make_rows
from rlhf_passes import direct_gradients
from rlhf_passes.fast_passes import FastPasses
from rlhf_passes.packing import PackedRows
from rlhf_testing.models import tiny_model, tiny_tokenizer

Samples = dict[int, tuple[int, ...]]
PROMPT, ANSWERS = 256, 16
EPISODES, TURNS, TURN, OBSERVATION = 16, 6, 24, 24
TRAINED = ((128, 48), (512, 64))
"""Tokens of prompts and answers in training."""


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


class SeparateRows(FastPasses):
    """The same passes with each row's own prompt."""

    plan = ForwardPasses.plan

    def lay_out(self, model: Any, rows: Any) -> Any:
        return PackedRows(rows)


def smollm2(layers: int) -> LlamaForCausalLM:
    """A random model in the shape of SmolLM2-135M, which has 30 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def trained_items(prompts: int, prompt: int, answer: int, answers: int = 8) -> list[BufferItem]:
    generator = torch.Generator().manual_seed(0)
    found: list[BufferItem] = []
    for group in range(prompts):
        ids = torch.randint(1, 49152, (prompt,), generator=generator)
        for _ in range(answers):
            sampled = torch.randint(1, 49152, (answer,), generator=generator)
            mask, zeros = torch.ones(answer, dtype=torch.bool), torch.zeros(answer)
            found.append(
                BufferItem(
                    sample_id=len(found),
                    group_id=group,
                    policy_version=0,
                    prompt_ids=ids,
                    response_ids=sampled,
                    action_mask=mask,
                    action_log_probs=zeros,
                )
            )
    return found


def passed(
    model: LlamaForCausalLM, passes: FastPasses, items: list[BufferItem], *, backward: bool
) -> list[torch.Tensor]:
    """Run scoring, or the passes of an update, at the default size. Return all log-probs and a gradient."""
    place = LocalPlace(torch.device("cpu"), torch.float32)
    found: dict[int, torch.Tensor] = {}
    model.zero_grad(set_to_none=False)
    with torch.set_grad_enabled(backward), direct_gradients(model):
        for plan in passes.plan([[item] for item in items], None, place, model):
            with applying(passes, passes.applied(model)):
                log_probs = policy_forward(model, collate([items[index] for index in plan]), 1.0).log_probs
                if backward:
                    (log_probs * torch.tensor([[1.0 + index % 7] for index in plan])).sum().div(len(items)).backward()
            found.update(zip(plan, log_probs.detach(), strict=True))
    log_probs = torch.stack([found[index] for index in range(len(items))])
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    return [log_probs, *([gradient / gradient.norm()] if backward else [])]


def training(prompts: int, layers: int, rounds: int) -> dict[str, dict[str, float]]:
    model, found = smollm2(layers), {}
    for prompt, answer in TRAINED:
        items = trained_items(prompts, prompt, answer)
        for phase in ("scoring", "update"):
            seconds: dict[str, list[float]] = {"separate": [], "shared": []}
            for number in range(rounds + 1):
                results = []
                for name, passes in (("separate", SeparateRows()), ("shared", FastPasses())):
                    started = time.process_time()
                    results.append(passed(model, passes, items, backward=phase == "update"))
                    if number:  # the first round is warm-up
                        seconds[name].append(time.process_time() - started)
                torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
            before, after = (min(each) for each in seconds.values())
            found[f"{phase}, {prompts} prompts of {prompt}, 8 answers of {answer}"] = {
                "seconds": round(before, 3),
                "seconds_shared": round(after, 3),
                "ratio": round(before / after, 2),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(options.threads)
    if options.training:
        found = training(options.prompts, options.layers, rounds)
        for case, figures in found.items():
            print(json.dumps({"case": case, **figures}), flush=True)
        print(json.dumps(found))
        return
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
