"""`ExperienceMakerHolder`: answers prompts of a data loader, scores and sends the samples, and a trainer prints them.

The tiny models are created here. Takes seconds on a CPU.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.types import Experience
from rlhf_ppo import Critic
from rlhf_ray import DetachedTrainer, ExperienceMakerHolder, local_ray
from rlhf_seed import strategy_by_name

EOS = 2


def my_actor() -> LlamaForCausalLM:
    """Create the actor, always the same, since the initial model is the actor at the start."""
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
    """Batches of prompts, left-padded."""
    return [{"input_ids": ids, "attention_mask": ids != 0} for ids in torch.tensor([[[0, 6, 7], [8, 9, 4]]] * 2)]


@ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "compute": 1})
class Printer(DetachedTrainer):
    """Replaces a `DetachedPPOTrainer`, without training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lines: list[str] = []

    def training_step(self, experience: Experience) -> dict[str, Any]:
        reward = float(experience.rewards["reward"].mean())
        self.lines.append(f"samples {experience.sample_ids.tolist()}: reward {reward:.3f}")
        return {"reward": reward}

    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:
        """Send no weights, since nothing is trained."""

    def get_lines(self) -> list[str]:
        return self.lines


def main() -> None:
    """Make five passes over the prompts."""
    with local_ray(num_gpus=1):  # nominal: `device` below decides
        trainer = Printer.options(name="trainer_0", num_cpus=0).remote(["maker_0"], train_batch_size=4)
        maker = ExperienceMakerHolder.options(name="maker_0", num_gpus=1).remote(
            detached_trainer_name_list=["trainer_0"],
            strategy_fn=lambda: strategy_by_name("single", device="cpu"),
            model_fn=lambda: (my_actor(), my_critic(), my_reward_model(), my_actor()),
            kl_coef=0.1,
            buffer_cpu_offload=True,
            eval_performance=True,
            max_length=12,
            top_k=50,
            eos_token_id=EOS,
        )
        # Start the experience generation loop
        loop = maker.workingloop.remote(dataloader_fn=lambda: my_dataloader(), num_epochs=5)
        ray.get(trainer.fit.remote(total_steps=5, update_steps=5))
        ray.get(loop)
        print("\n".join(ray.get(trainer.get_lines.remote())))


if __name__ == "__main__":
    main()
