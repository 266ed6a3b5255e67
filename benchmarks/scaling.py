"""Whether a PPO iteration's cost grows linearly: seconds per token and peak memory by prompts and answer lengths.

Exits with 1 if an answer token costs more than 1.2 times its cost in the first case.

The model is S or M of `peers/inputs.py` (1.18M or 35.7M parameters). All prompts of an iteration make one update, whose
passes are bounded by tokens. Tokens include those of prompts and of answers. Every case is a separate process.

    python benchmarks/scaling.py --model S --prompts 32 128 512 1024 --new-tokens 64 128 256 512
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))
from inputs import PROMPT_TOKENS, SIZES, write_inputs  # noqa: E402 - next to run_rlhf.py

BASE_PROMPTS, BASE_NEW_TOKENS = 32, 64
BOUND = 1.2
DEADLINE_SECONDS = 900


def measure(model: str, prompts: int, new_tokens: int, iterations: int, threads: int) -> tuple[float, float, float]:
    """Microseconds per token and per answer token (medians of the iterations), and peak bytes."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), model, varied=False, num_prompts=prompts)
        command = [sys.executable, str(PEERS / "run_rlhf.py"), "--inputs", folder, "--prompts", str(prompts)]
        command += ["--new-tokens", str(new_tokens), "--iterations", str(iterations)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS, env=environment
        )
    result = json.loads(done.stdout.strip().splitlines()[-1])
    prompt_tokens = prompts * sum(PROMPT_TOKENS) / 2
    measured = list(zip(result["seconds"], result["tokens"], strict=True))
    each, each_new = ([s / (t + more) for s, t in measured] for more in (prompt_tokens, 0))
    return statistics.median(each) * 1e6, statistics.median(each_new) * 1e6, result["peak_bytes"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="S")
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 128, 512, 1024])
    parser.add_argument("--new-tokens", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    cases = [(count, BASE_NEW_TOKENS) for count in options.prompts]
    cases += [(BASE_PROMPTS, length) for length in options.new_tokens if length != BASE_NEW_TOKENS]
    base, base_new, worst = 0.0, 0.0, 0.0
    print("| prompts | new tokens | us a token | of the first | peak GB | us a new token | of the first |")
    print("|---|---|---|---|---|---|---|")
    for prompts, new_tokens in cases:
        each, each_new, peak = measure(options.model, prompts, new_tokens, options.iterations, options.threads)
        base, base_new = base or each, base_new or each_new
        worst = max(worst, each_new / base_new)
        line = f"| {prompts} | {new_tokens} | {each:.0f} | {each / base:.2f} | {peak / 1e9:.2f}"
        print(f"{line} | {each_new:.0f} | {each_new / base_new:.2f} |", flush=True)
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
