"""Log-probs and entropy, forward and backward, at a large vocabulary: all logits at once compared with chunks.

    python benchmarks/log_probs.py --tokens 1024

Each side runs in separate processes, in turn. Memory is the peak of the process above its memory before the pass.
Prints the ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

SIDES = ("plain", "chunked")


def measure(side: str, tokens: int, hidden: int, vocabulary: int) -> dict[str, float]:
    """Run one pass in this process. Return seconds, and bytes beyond weights and their gradients."""
    import torch

    from rlhf_forward.logprobs import entropy, token_log_probs
    from rlhf_passes.chunked import Chunked
    from rlhf_passes.lean_head import CHUNK_LOGITS

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(vocabulary, hidden).div_(hidden**0.5))
    states = torch.randn(tokens, hidden, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if side == "plain":
        logits = states @ weight.T
        log_probs, entropies = token_log_probs(logits, labels), entropy(logits)
    else:
        chunk = max(1, CHUNK_LOGITS // vocabulary)
        log_probs, entropies = Chunked(chunk, with_entropy=True).of(states, weight, labels)
    (log_probs.sum() - 0.01 * entropies.sum()).backward()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradient = weight.numel() * weight.element_size()
    return {"seconds": seconds, "bytes": (peak - before) * 1024.0 - gradient, "check": float(log_probs.sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    sizes = (options.tokens, options.hidden, options.vocabulary)
    if options.side:
        print(json.dumps(measure(options.side, *sizes)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side]
            command += ["--tokens", str(sizes[0]), "--hidden", str(sizes[1]), "--vocabulary", str(sizes[2])]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            found[side].append(json.loads(done.stdout))
    median = {s: {k: statistics.median(r[k] for r in found[s]) for k in ("seconds", "bytes")} for s in SIDES}
    print(f"{sizes[0]} tokens, hidden {sizes[1]}, vocabulary {sizes[2]}, float32, medians of {options.repeats}")
    for side in SIDES:
        print(f"{side:8} {median[side]['seconds']:8.2f} s  {median[side]['bytes'] / 2**20:8.0f} MiB")
    for key in ("seconds", "bytes"):
        print(f"chunked / plain {key}: {median['chunked'][key] / median['plain'][key]:.2f}")


if __name__ == "__main__":
    main()
