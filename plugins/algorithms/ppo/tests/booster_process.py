"""One process of `test_booster.py`: PPOTrainer on ColossalAI Boosters. Arguments: rank, world size, store, output."""

from __future__ import annotations

import copy
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rlhf_core.types import Rollout
from rlhf_ppo import Critic, PPOTrainer
from rlhf_testing.models import tiny_model, tiny_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchDDPPlugin

TEXTS = ["1>", "22>", "3>", "44>", "5>", "66>", "7>", "88>"]


def length_of(rollouts: list[Rollout]) -> list[float]:
    return [float(len(rollout.completion_ids) + rollout.prompt_ids[0]) for rollout in rollouts]


def unwrapped(trainer: PPOTrainer) -> torch.nn.Module:
    module: torch.nn.Module = trainer.actor.unwrap()
    return module.module if hasattr(module, "module") else module


def main(rank: int, world_size: int, store: str, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=600),
    )
    tokenizer = tiny_tokenizer("0123456789>,")
    actor = tiny_model(tokenizer, hidden_size=32, num_layers=1, num_heads=2, seed=0)
    critic, reference = Critic.from_pretrained(actor), copy.deepcopy(actor)
    boosters, prepared = [], []
    for model in (actor, critic):
        booster = Booster(plugin=TorchDDPPlugin())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            boosted, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
        boosters.append(booster)
        prepared.append((boosted, optimizer, schedule))
    trainer = PPOTrainer(
        *boosters,
        prepared[0][0],
        prepared[1][0],
        length_of,
        reference,
        prepared[0][1],
        prepared[1][1],
        prepared[0][2],
        prepared[1][2],
        tokenizer,
        ptx_coef=0.0,
        train_batch_size=4 // world_size,
        accumulation_steps=2,
        save_interval=1,
        save_dir=str(output / "checkpoints"),
        max_new_tokens=6,
        do_sample=False,  # the same answers whoever makes them
    )
    prompts = [[{"prompt": text}] for text in TEXTS[rank::world_size]]
    trainer.fit(1, len(prompts), 2, prompts, log_dir=str(output / "logs"))
    trained = {f"actor.{name}": t.clone() for name, t in unwrapped(trainer).state_dict().items()}
    assert trainer.load_checkpoint() == 1
    again = unwrapped(trainer).state_dict()
    assert all(torch.equal(again[name.removeprefix("actor.")], tensor) for name, tensor in trained.items())
    save_file(trained, output / f"rank-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
