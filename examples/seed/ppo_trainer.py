"""`PPOTrainer` as in ColossalChat's documentation, with the same call and `fit`, and tiny models created here.

Runs on a CPU in seconds and writes ./checkpoints and ./logs: `python ppo_trainer.py`.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader

from rlhf_core import Rollout
from rlhf_ppo import Critic, PPOTrainer
from rlhf_seed import strategy_by_name
from rlhf_testing.models import tiny_model, tiny_tokenizer


def fraction_of_sevens(rollouts: Sequence[Rollout]) -> list[float]:
    """The reward: the share of the digit 7 in an answer."""
    return [rollout.completion.count("7") / max(1, len(rollout.completion_ids)) for rollout in rollouts]


tokenizer = tiny_tokenizer("0123456789>")
actor = tiny_model(tokenizer, hidden_size=32, num_layers=1, num_heads=2, seed=0)
critic, ref_model = Critic.from_pretrained(actor), copy.deepcopy(actor)
reward_model = fraction_of_sevens

# With colossalai.booster.Booster: create the optimizer and the schedule, then booster.boost(model, optimizer, …).
booster = strategy_by_name("single", device="cpu")
booster.setup()
actor_booster = critic_booster = booster
actor_optim = booster.make_optimizer(actor.parameters(), lr=2e-2)
critic_optim = booster.make_optimizer(critic.parameters(), lr=2e-2)
actor, actor_optim, actor_lr_scheduler = booster.prepare(actor, actor_optim, ConstantLR(actor_optim, 1.0))
critic, critic_optim, critic_lr_scheduler = booster.prepare(critic, critic_optim, ConstantLR(critic_optim, 1.0))
coordinator = None  # or colossalai.cluster.DistCoordinator()

prompts = [{"prompt": f"{number}>"} for number in range(64)]
train_prompt_dataloader = DataLoader(prompts, batch_size=32, shuffle=False, collate_fn=list)
train_pretrain_dataloader = None  # ptx_coef is 0

trainer = PPOTrainer(
    actor_booster=actor_booster,
    critic_booster=critic_booster,
    actor=actor,
    critic=critic,
    reward_model=reward_model,
    initial_model=ref_model,
    actor_optim=actor_optim,
    critic_optim=critic_optim,
    actor_lr_scheduler=actor_lr_scheduler,
    critic_lr_scheduler=critic_lr_scheduler,
    tokenizer=tokenizer,
    kl_coef=0.1,
    ptx_coef=0.0,
    train_batch_size=16,
    accumulation_steps=8,
    save_dir="./checkpoints",
    coordinator=coordinator,
    save_interval=10,  # the original example does not save
    max_new_tokens=4,
)

trainer.fit(
    num_episodes=10,
    num_collect_steps=2,
    num_update_steps=5,
    prompt_dataloader=train_prompt_dataloader,
    pretrain_dataloader=train_pretrain_dataloader,
    log_dir="./logs",
    use_wandb=False,
)

lines = [json.loads(line) for line in Path("logs/metrics.jsonl").read_text().splitlines()]
print(f"{len(lines)} steps: reward {lines[0]['reward/mean']:.2f} -> {lines[-1]['reward/mean']:.2f}")
