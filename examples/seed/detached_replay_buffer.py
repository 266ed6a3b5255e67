"""`DetachedReplayBuffer`: workers in other processes fill it, and this one reads batches. Takes seconds on a CPU."""

from __future__ import annotations

import ray
import torch

from rlhf_core.batching import collate
from rlhf_core.types import BufferItem, Experience
from rlhf_ray import DetachedReplayBuffer, local_ray


def my_experience(first: int, num_samples: int) -> Experience:
    """Create an experience like a maker, with made-up tokens."""
    return collate(
        [
            BufferItem(
                sample_id=number,
                group_id=number,
                policy_version=0,
                prompt_ids=torch.tensor([1, 2, 3]),
                response_ids=torch.tensor([number % 16, 2]),
                action_mask=torch.ones(2, dtype=torch.bool),
                action_log_probs=torch.full((2,), -2.7),
                rewards={"reward": 1.0},
            )
            for number in range(first, first + num_samples)
        ]
    )


@ray.remote(num_cpus=0)
def maker(buffer: DetachedReplayBuffer, first: int) -> None:
    """Called remotely, like by ExperienceMakerHolder."""
    buffer.append(my_experience(first, num_samples=6))


def main() -> None:
    """Fill a buffer and empty it."""
    with local_ray():
        # Create a buffer that batches experiences into groups of 8
        buffer = DetachedReplayBuffer(sample_batch_size=8, limit=16)
        ray.get([maker.remote(buffer, first) for first in range(0, 24, 6)])
        while buffer.get_length() > 0:
            # Locally called by the trainer to get a batch
            batch = buffer.sample(to_device="cpu")
            print(f"a batch of samples {batch.sample_ids.tolist()}, tokens {tuple(batch.sequences.shape)}")


if __name__ == "__main__":
    main()
