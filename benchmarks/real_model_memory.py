"""Time and peak memory of scoring and of an update at real vocabularies and contexts, compared with transformers.

A generated small Llama (hidden 256, 4 layers, head tied to the embedding) with a vocabulary of 49k to 256k processes
one sample of 1k to 8k tokens, all but 16 of them its answer. Plain: the model's logits of all positions and their
log-softmax. Ours: `policy_forward` as called by the trainer. Scoring runs without gradients. An update is forward and
backward. Every measurement is a separate process. Memory is its high-water mark above the memory before the pass,
including weight gradients in an update. Plain cases that need more than the free memory are listed as not run.

    python benchmarks/real_model_memory.py --contexts 1024 8192
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

SIDES, PHASES = ("plain", "ours"), ("scoring", "update")
PROMPT_TOKENS, HIDDEN, LAYERS = 16, 256, 4
PLAIN_COPIES = {"scoring": 2.2, "update": 3.3}
"""Approximate number of copies of all float32 logits that a plain pass holds at once."""
DEADLINE_SECONDS = 600


def build_model(vocabulary: int, context: int) -> LlamaForCausalLM:
    """Build the same random weights for both sides."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def plain_log_probs(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Log-probs [A] as usually computed in a loop over transformers."""
    log_probs = model(input_ids=ids[None]).logits[0, PROMPT_TOKENS - 1 : -1].float().log_softmax(-1)
    return log_probs.gather(-1, ids[PROMPT_TOKENS:, None]).squeeze(-1)


def our_log_probs(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Log-probs [A] as computed by the trainer."""
    import torch

    from rlhf_core.batching import collate
    from rlhf_core.types import BufferItem
    from rlhf_forward import policy_forward

    answer = ids[PROMPT_TOKENS:]
    item = BufferItem(
        sample_id=0,
        group_id=0,
        policy_version=0,
        prompt_ids=ids[:PROMPT_TOKENS],
        response_ids=answer,
        action_mask=torch.ones(len(answer), dtype=torch.bool),
        action_log_probs=torch.zeros(len(answer)),
    )
    return policy_forward(model, collate([item]), 1.0).log_probs[0]


def measure(side: str, phase: str, vocabulary: int, context: int) -> dict[str, float]:
    """Run one pass in this process."""
    import torch

    from rlhf_passes.fast_passes import fast_passes

    model = build_model(vocabulary, context)
    ids = torch.randint(0, vocabulary, (context,))
    forward: Callable[[LlamaForCausalLM, Tensor], Tensor] = plain_log_probs if side == "plain" else our_log_probs
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with torch.set_grad_enabled(phase == "update"), fast_passes(*([model] if side == "ours" else [])):
        log_probs = forward(model, ids)
        if phase == "update":
            (-log_probs.mean()).backward()
    seconds = time.perf_counter() - started
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024.0
    return {"seconds": seconds, "bytes": held, "check": float(log_probs.detach().mean())}


def run(side: str, phase: str, vocabulary: int, context: int, threads: int) -> dict[str, float] | None:
    """Measure in a separate process. None if memory is insufficient."""
    if side == "plain" and PLAIN_COPIES[phase] * 4 * vocabulary * context > 0.9 * psutil.virtual_memory().available:
        return None
    command = [sys.executable, __file__, "--measure", side, phase, str(vocabulary), str(context)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def line(phase: str, vocabulary: int, context: int, threads: int) -> str:
    """Row of the table. Checks that both sides got the same log-probs."""
    plain, ours = (run(side, phase, vocabulary, context, threads) for side in SIDES)
    assert ours is not None
    cells = [phase, f"{vocabulary:,}", f"{context:,}", f"{ours['seconds']:.2f}", f"{ours['bytes'] / 1e9:.2f}"]
    if plain is None:
        logits = 4 * vocabulary * context / 1e9
        return f"| {' | '.join(cells)} | not run: its logits alone are {logits:.1f} GB | | | |"
    if abs(plain["check"] - ours["check"]) > 1e-3:
        raise SystemExit(f"the sides differ: {plain['check']} and {ours['check']}")
    cells += [f"{plain['seconds']:.2f}", f"{plain['bytes'] / 1e9:.2f}"]
    cells += [f"{ours[key] / plain[key]:.2f}" for key in ("seconds", "bytes")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936, 256_000])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--measure", nargs=4, metavar=("SIDE", "PHASE", "VOCABULARY", "CONTEXT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.measure:
        side, phase, vocabulary, context = options.measure
        print(json.dumps(measure(side, phase, int(vocabulary), int(context))))
        return
    print(f"one sample, hidden {HIDDEN}, {LAYERS} layers, float32, {options.threads} threads")
    print("| | vocabulary | tokens | ours, s | ours, GB | plain, s | plain, GB | time, ours / plain | memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    for phase in PHASES:
        for vocabulary in options.vocabularies:
            for context in options.contexts:
                print(line(phase, vocabulary, context, options.threads), flush=True)


if __name__ == "__main__":
    main()
