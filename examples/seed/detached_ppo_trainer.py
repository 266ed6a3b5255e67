"""`DetachedPPOTrainer` and `ExperienceMakerHolder`: two makers feed two trainers, which train one policy with DDP.

The tiny models are created here. Takes less than a minute on a CPU. Writes the trained actor to `./actor_checkpoint`.
"""

from __future__ import annotations

import socket
from typing import Any

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_ppo import Critic, DetachedPPOTrainer
from rlhf_ray import ExperienceMakerHolder, local_ray
from rlhf_seed import strategy_by_name

EOS = 2
MAKERS = ["maker_0", "maker_1"]
TRAINERS = ["trainer_0", "trainer_1"]


def my_actor() -> LlamaForCausalLM:
    """Create the actor, always the same, so that all trainers and makers start from one policy."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, eos_token_id=EOS, pad_token_id=0, **sizes))


def my_critic() -> Critic:
    """The actor's body with a value head."""
    return Critic.from_pretrained(my_actor())


def my_reward_model() -> Any:
    """Score answers by the share of token 5. Any sequence classifier works, too."""
    return lambda rollouts: [each.completion_ids.count(5) / len(each.completion_ids) for each in rollouts]


def my_dataloader() -> list[dict[str, torch.Tensor]]:
    """Four batches of eight prompts of three tokens."""
    ids = torch.randint(3, 16, (4, 8, 3), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in ids]


def free_port() -> int:
    """Return a free port, at which the trainers' process group connects."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_maker(name: str) -> Any:
    """Create a maker that sends its samples to both trainers in turn."""
    return ExperienceMakerHolder.options(name=name, num_gpus=1).remote(
        detached_trainer_name_list=TRAINERS,
        strategy_fn=lambda: strategy_by_name("single", device="cpu"),
        model_fn=lambda: (my_actor(), my_critic(), my_reward_model(), my_actor()),
        sync_models_from_trainers=True,
        kl_coef=0.1,
        max_length=8,
        eos_token_id=EOS,
    )


def start_trainer(rank: int, port: int) -> Any:
    """Create one rank of the process group that `env_info` describes."""
    group = {"rank": rank, "local_rank": rank, "world_size": len(TRAINERS), "master_port": port}
    return DetachedPPOTrainer.options(name=TRAINERS[rank], num_gpus=1).remote(
        experience_maker_holder_name_list=MAKERS,
        strategy_fn=lambda: strategy_by_name("ddp", device="cpu"),
        model_fn=lambda: (my_actor(), my_critic()),
        env_info={"master_addr": "127.0.0.1", **{name: str(value) for name, value in group.items()}},
        train_batch_size=8,
        eps_clip=0.2,
        value_clip=0.4,
        eval_performance=True,
        actor_lr=1e-3,
        critic_lr=1e-3,
    )


def main() -> None:
    """Sync, train, save."""
    # Nominal GPUs, which the machine need not have: `device` decides. An actor with num_gpus=1 also reserves a CPU.
    with local_ray(num_cpus=4, num_gpus=4):
        port = free_port()
        makers = [start_maker(name) for name in MAKERS]
        trainers = [start_trainer(rank, port) for rank in range(len(TRAINERS))]

        # Sync initial model weights to experience makers
        ray.get([trainer.sync_models_to_remote_makers.remote() for trainer in trainers])

        # Start training
        loops = [maker.workingloop.remote(dataloader_fn=lambda: my_dataloader(), num_epochs=2) for maker in makers]
        # 2 makers x 2 epochs x 4 batches of 8 prompts are 8 batches of 8 samples for each trainer.
        ray.get([trainer.fit.remote(total_steps=8, update_steps=2, train_epochs=2) for trainer in trainers])
        ray.get(loops)
        print(f"the makers sample from version {ray.get([maker.get_policy_version.remote() for maker in makers])}")

        # Save models
        ray.get([trainer.strategy_save_actor.remote("./actor_checkpoint", only_rank0=True) for trainer in trainers])


if __name__ == "__main__":
    main()
