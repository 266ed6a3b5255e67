"""Compare the speed of `rlhf serve-training` with `rlhf train` on the same work: supervised steps of a LoRA adapter.

Both read the same prompts and answers, and make the same updates with the strategy `single`. The service is used
through the SDK, so serialization, HTTP and its journal are included. The first update of each is not counted.

    python benchmarks/serve_training.py --base recipes/smollm2/model --rows 32 --steps 4
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

KEY = "RLHF_SERVE_TRAINING_KEY"
WORDS = ["the", "a", "river", "stone", "light", "under", "over", "green", "quickly", "people", "never", "always"]


def write_data(path: Path, count: int) -> list[dict[str, str]]:
    """Write prompts of about 64 tokens and answers of about 48, and return them."""
    rng = random.Random(0)
    rows = [
        {key: " ".join(rng.choice(WORDS) for _ in range(size)) for key, size in (("prompt", 64), ("completion", 48))}
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def train_seconds(options: argparse.Namespace, data: Path, folder: Path) -> list[float]:
    """Seconds of each update of `rlhf train`, after the first."""
    from rlhf_core import train

    run = {
        "model": {"path": options.base, "lora": {"r": options.rank}},
        "algorithm": {"name": "sft"},
        "prompts": {"name": "jsonl", "path": str(data)},
        "optimizer": {"lr": 1e-4, "warmup_episodes": 0, "schedule": "constant"},
        "train": {"episodes": options.steps + 1, "prompts_per_episode": options.rows, "train_batch_size": options.rows},
        "eval": {"num_prompts": 0},
    }
    train(run, output=folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["time/train_s"] for line in lines if "time/train_s" in line][1:]


def service_seconds(options: argparse.Namespace, rows: list[dict[str, str]], folder: Path) -> list[float]:
    """Seconds of each step of the service, after the first."""
    key = f"tml-{secrets.token_hex(24)}"
    command = [sys.executable, "-m", "rlhf_cli", "serve-training", "--base", options.base, "--output", str(folder)]
    environment = {**os.environ, KEY: key, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--port", "0", "--max-rank", str(options.rank)], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            address = next(found[1] for line in server.stdout if (found := re.search(r"training at (\S+)", line)))
            return client_seconds(options, rows, address, key)
        finally:
            server.terminate()


def client_seconds(options: argparse.Namespace, rows: list[dict[str, str]], address: str, key: str) -> list[float]:
    """Seconds of each step, seen by a client."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=address, api_key=key)
    training = service.create_lora_training_client(base_model=options.base, rank=options.rank).result()
    tokenizer = training.get_tokenizer()
    data = []
    for row in rows:
        prompt = tokenizer.encode(row["prompt"])
        answer = [*tokenizer.encode(row["completion"]), tokenizer.eos_token_id]
        ids = prompt + answer
        weights = [0.0] * (len(prompt) - 1) + [1.0 / len(answer)] * len(answer)
        inputs = {"target_tokens": ids[1:], "weights": weights}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    seconds = []
    for _ in range(options.steps + 1):
        begun = time.perf_counter()
        forward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-4))
        forward.result()
        step.result()
        seconds.append(time.perf_counter() - begun)
    service.close("success").result()
    return seconds[1:]


def main() -> None:
    """Print the median seconds of both, and the ratio of their throughputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="model folder")
    parser.add_argument("--rows", type=int, default=32, help="rows of an update")
    parser.add_argument("--steps", type=int, default=4, help="counted updates")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter")
    options = parser.parse_args()
    options.base = os.path.abspath(options.base)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_data(folder / "data.jsonl", options.rows)
        service = median(service_seconds(options, rows, folder / "service"))
        plain = median(train_seconds(options, folder / "data.jsonl", folder / "run"))
    print(f"rlhf train {plain:.2f} s, rlhf serve-training {service:.2f} s, throughput ratio {plain / service:.2f}")


if __name__ == "__main__":
    main()
