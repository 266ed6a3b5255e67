"""Memory of each process that trains a model together with others: its own high-water mark, against the whole.

    python benchmarks/tensor_parallel.py [--processes 4 --tensor-parallel 2 --sequence-parallel --parameters-m 300]

Each process makes a Llama in code, makes two updates on a few tokens, and tells what it holds and the most it ever held
(VmHWM of Linux). `training` is what the updates added to the peak of loading, which is the whole weights once. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.contexts import strategy_context
from rlhf_core.testing.tiny_training import token_loss
from rlhf_torch.config import FsdpConfig
from rlhf_torch.fsdp import build

LAYERS, VOCABULARY, TOKENS = 16, 32_000, 64


def model_of(parameters_m: float) -> LlamaForCausalLM:
    """About so many million parameters, tied embeddings: 11 hidden² a layer."""
    hidden = 64
    while LAYERS * 11 * hidden**2 + VOCABULARY * hidden < parameters_m * 1e6:
        hidden += 64
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 7 // 3 // 32 * 32,
            num_hidden_layers=LAYERS,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 32,
            tie_word_embeddings=True,
        )
    )


def high_water_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def held_bytes(tensors: Any) -> int:
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(each.numel() * each.element_size() for each in local)


def work(rank: int, arguments: argparse.Namespace, port: int, out: str) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": arguments.processes, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    base = high_water_bytes()
    config = FsdpConfig(tensor_parallel=arguments.tensor_parallel, sequence_parallel=arguments.sequence_parallel)
    strategy = build(config, strategy_context("cpu"))
    strategy.setup()
    model = model_of(arguments.parameters_m)
    whole = sum(parameter.numel() for parameter in model.parameters())
    trained = strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=1e-4))
    loaded = high_water_bytes()
    losses = []
    for update in range(2):
        generator = torch.Generator().manual_seed(100 * update + strategy.rank)
        ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
        loss = token_loss(trained.model(input_ids=ids).logits, ids)
        with strategy.accumulate(trained.model, is_last=True):
            strategy.backward(loss * strategy.gradient_average_factor / strategy.world_size, trained.optimizer)
        strategy.step(trained)
        losses.append(float(strategy.all_reduce(loss.detach())) / strategy.world_size)
    moments = [state[key] for state in trained.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    told = {
        "rank": rank,
        "num_parameters": whole,
        "whole_bytes": 16 * whole,
        "weights_bytes": held_bytes(trained.model.parameters()),
        "moments_bytes": held_bytes(moments),
        "libraries_bytes": base,
        "loaded_bytes": loaded,
        "peak_bytes": high_water_bytes(),
        "losses": losses,
    }
    (Path(out) / f"{rank}.json").write_text(json.dumps(told))
    strategy.teardown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--parameters-m", type=float, default=300.0)
    arguments = parser.parse_args()
    with socket.socket() as free, tempfile.TemporaryDirectory() as out:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        start_processes(work, (arguments, port, out), nprocs=arguments.processes, start_method="spawn")
        ranks = [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(arguments.processes)]
    print(f"{ranks[0]['num_parameters'] / 1e6:.0f}M parameters: {ranks[0]['whole_bytes'] / 1e9:.2f} GB to train")
    for each in ranks:
        sizes = {key.removesuffix("_bytes"): f"{each[key] / 1e9:.2f}" for key in each if key.endswith("_bytes")}
        print(f"rank {each['rank']}, GB:", ", ".join(f"{name} {size}" for name, size in sizes.items()))
    print(json.dumps({"arguments": vars(arguments), "ranks": ranks}))


if __name__ == "__main__":
    main()
