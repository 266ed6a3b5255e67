"""Updates, scoring and rollouts of a float32 model in bfloat16 arithmetic on a CPU (`strategy.precision: bf16`).

A random model in the shape of SmolLM2-135M. Rows of the table are passes as this project runs them, in float32 and in
bfloat16, and the same rows as plain transformers under torch's autocast. Sides take turns. The error is that of the
log-probs and gradients to float32, relative, mean over weights.

    python benchmarks/bfloat16.py --layers 30
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from prefixes import smollm2, trained_items
from torch import Tensor
from transformers import LlamaForCausalLM

from rlhf_core.batching import collate
from rlhf_core.components import EngineContext
from rlhf_core.models.forward_passes import applying
from rlhf_core.place import LocalPlace
from rlhf_core.types import BufferItem, GenerationRequest, SamplingParams
from rlhf_forward import policy_forward
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine
from rlhf_passes import direct_gradients
from rlhf_passes.fast_passes import FastPasses
from rlhf_testing.models import tiny_tokenizer

Run = Callable[[], list[Tensor]]
SIDES = {"float32": (None, True), "bfloat16": (torch.bfloat16, True), "plain bfloat16": (torch.bfloat16, False)}


def passed(model: LlamaForCausalLM, items: list[BufferItem], dtype: torch.dtype | None, ours: bool, back: bool) -> Run:
    """Log-probs, and gradients if `back`, of passes of the default size."""
    place = LocalPlace(torch.device("cpu"), torch.float32, dtype)

    def run() -> list[Tensor]:
        passes = FastPasses()
        model.zero_grad(set_to_none=False)
        found: dict[int, Tensor] = {}
        with torch.set_grad_enabled(back), direct_gradients(model) if ours else nullcontext():
            for plan in passes.plan([[item] for item in items], None, place, model):
                with applying(passes, passes.applied(model)) if ours else nullcontext():
                    with place.autocast():
                        log_probs = policy_forward(model, collate([items[index] for index in plan]), 1.0).log_probs
                    if back:
                        (log_probs * torch.tensor([[1.0 + index % 7] for index in plan])).sum().backward()
                found.update(zip(plan, log_probs.detach(), strict=True))
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None] if back else []
        return [torch.stack([found[index] for index in range(len(items))]), *gradients]

    return run


def rollout(model: LlamaForCausalLM, prompts: int, dtype: torch.dtype | None) -> Run:
    """Sampled answers of 48 tokens, 8 to each prompt of 128 tokens."""
    config = HfEngineConfig(precision="fp32" if dtype is None else "bf16")
    engine = HfEngine(
        config, EngineContext(model=model, tokenizer=tiny_tokenizer(), device=torch.device("cpu"), seed=0)
    )
    ids = [tuple(torch.randint(1, 49152, (128,)).tolist()) for _ in range(prompts)]
    requests = [GenerationRequest(sample_id=index, prompt_ids=ids[index // 8]) for index in range(8 * prompts)]

    def run() -> list[Tensor]:
        completions = list(engine.generate(requests, SamplingParams(max_new_tokens=48)))
        assert len(completions) == len(requests)
        return []

    return run


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = [(one, other) for one, other in zip(found, exact, strict=True) if other.norm() > 0]
    return statistics.fmean(float((one - other).norm() / other.norm()) for one, other in pairs)


def measure(name: str, sides: dict[str, Run], rounds: int) -> None:
    results = {side: run() for side, run in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            started = time.process_time()
            run()
            seconds[side].append(time.process_time() - started)
    for side, times in seconds.items():
        best, exact = min(times), results["float32"]
        ratio = min(seconds["float32"]) / best
        wrong = f"{error(results[side], exact):.1e}" if exact else "-"
        print(f"| {name} | {side} | {best:.2f} | {ratio:.2f} | {wrong} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = smollm2(options.layers)
    print("| | arithmetic | seconds of processor time | float32 / this | error |\n|---|---|---|---|---|")
    for prompt, answer in ((128, 48), (512, 64)):
        items = trained_items(options.prompts, prompt, answer)
        for phase, back in (("scoring", False), ("update", True)):
            sides = {side: passed(model, items, *how, back) for side, how in SIDES.items()}
            measure(f"{phase}, prompts of {prompt}, answers of {answer}", sides, options.rounds)
    with torch.no_grad():
        sides = {side: rollout(model, options.prompts, SIDES[side][0]) for side in ("float32", "bfloat16")}
        measure("rollout, prompts of 128, answers of 48", sides, options.rounds)


if __name__ == "__main__":
    main()
