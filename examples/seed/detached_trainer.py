"""`DetachedTrainer`, subclassed: learns which token to sample from the samples of a maker in another process.

The policy is one row of logits and the maker a few lines, to show the data that is exchanged. Takes seconds on a CPU.
"""

from __future__ import annotations

from typing import Any

import ray
import torch

from rlhf_core.types import BufferItem, Experience
from rlhf_ray import DetachedTrainer, local_ray

NUM_TOKENS = 8
BEST = 3


@ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "compute": 1})
class MyTrainer(DetachedTrainer):
    """REINFORCE, with the mean reward of the batch as baseline."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits = torch.zeros(NUM_TOKENS, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=0.3)

    def training_step(self, experience: Experience) -> dict[str, Any]:
        rewards = experience.rewards["reward"]
        log_probs = self.logits.log_softmax(-1)[experience.sequences[:, -1]]
        loss = -((rewards - rewards.mean()) * log_probs).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:
        ray.get([call for _, call in self.makers.call("update", self.logits.detach())])

    def share_of_the_best(self) -> float:
        return self.logits.detach().softmax(-1)[BEST].item()


@ray.remote(max_concurrency=2)
class MyMaker:
    """Samples one token after an empty prompt. The best token gets a reward."""

    def __init__(self) -> None:
        self.logits = torch.zeros(NUM_TOKENS)

    def update(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def work(self, num_batches: int) -> None:
        trainer = ray.get_actor("trainer_0")
        for batch in range(num_batches):
            log_probs = self.logits.log_softmax(-1)
            tokens = torch.multinomial(log_probs.exp(), 8, replacement=True)
            items = [
                BufferItem(
                    sample_id=8 * batch + row,
                    group_id=8 * batch + row,
                    policy_version=0,
                    prompt_ids=torch.tensor([0]),
                    response_ids=token[None],
                    action_mask=torch.tensor([True]),
                    action_log_probs=log_probs[token][None],
                    rewards={"reward": float(token == BEST)},
                )
                for row, token in enumerate(tokens)
            ]
            ray.get(trainer.buffer_extend.remote(items))


def main() -> None:
    """Train on the maker's samples."""
    with local_ray():
        maker = MyMaker.options(name="maker_0", num_cpus=0).remote()
        trainer = MyTrainer.options(name="trainer_0", num_cpus=0).remote(
            experience_maker_holder_name_list=["maker_0"],
            train_batch_size=8,
            buffer_limit=1,
        )
        before = ray.get(trainer.share_of_the_best.remote())
        work = maker.work.remote(num_batches=40)
        ray.get(trainer.fit.remote(total_steps=40, update_steps=2, train_epochs=2))
        ray.get(work)
        after = ray.get(trainer.share_of_the_best.remote())
        print(f"the best token is sampled with probability {after:.2f}, at first it was {before:.2f}")
        assert after > before


if __name__ == "__main__":
    main()
