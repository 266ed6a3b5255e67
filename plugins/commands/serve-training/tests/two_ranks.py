"""A function that two ranks call: the same steps by `rlhf train` and by the service."""

import json
import os
from pathlib import Path

import numpy as np
import torch

from rlhf_core import train
from rlhf_serve_training.adapters import AdapterSpec
from rlhf_serve_training.options import WorkerOptions
from rlhf_serve_training.wire import Row
from rlhf_serve_training.worker import Worker
from rlhf_strategies.process_group import ProcessGroup

LINES = [
    {"prompt": "12", "completion": "345"},
    {"prompt": "9", "completion": "87"},
    {"prompt": "34", "completion": "1"},
]
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
RANK, SEED, NUM_STEPS = 4, 3, 2


def make_steps(base, folder, strategy):
    """Write `run`, a run of `rlhf train`, and `ours` and `ours.json`, the service's checkpoint, losses and norms."""
    group = ProcessGroup(torch.device("cpu"), timeout_seconds=120.0)
    group.join()  # both use this group
    try:
        _make_steps(base, Path(folder), strategy)
    finally:
        group.leave()


def _make_steps(base, folder, strategy):
    run = {
        "model": {"path": base, "lora": {"r": RANK}},
        "algorithm": {"name": "sft"},
        "strategy": {"name": strategy},
        "prompts": {"name": "jsonl", "path": str(folder / "data.jsonl")},
        "optimizer": {"lr": 1e-2, "warmup_episodes": 0, "schedule": "constant", "max_grad_norm": 1.0},
        "train": {"episodes": NUM_STEPS, "prompts_per_episode": 3, "train_batch_size": 3, "seed": SEED},
        "checkpoint": {"every_episodes": 1},
        "eval": {"num_prompts": 0},
    }
    train(run, output=folder / "run")
    worker = Worker(WorkerOptions(base, strategy=strategy, max_rank=8, device="cpu"))
    worker.create("m", AdapterSpec(RANK, seed=SEED))
    encode, eos = worker.tokenizer.encode, worker.tokenizer.eos_token_id
    pairs = [(encode(each["prompt"]), [*encode(each["completion"]), eos]) for each in LINES]
    count = sum(len(answer) for _, answer in pairs)
    rows = []
    for prompt, answer in pairs:
        ids = np.asarray(prompt + answer, np.int64)
        weights = np.asarray([0.0] * (len(prompt) - 1) + [1.0 / count] * len(answer), np.float32)
        rows.append(Row(ids[:-1], {"target_tokens": ids[1:], "weights": weights}))
    measured = []
    for _ in range(NUM_STEPS):
        loss = worker.forward("m", rows, "cross_entropy", {}, True)[1]["loss:sum"]
        measured.append((loss, worker.optim_step("m", ADAM)[0]))
    worker.save("m", str(folder / "ours"), True)
    worker.close()
    if int(os.environ["RANK"]) == 0:
        (folder / "ours.json").write_text(json.dumps(measured))
