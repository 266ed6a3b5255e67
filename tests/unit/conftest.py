"""A small PPO set-up with real models, on the strategy `single`."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.components import StrategyContext
from rlhf_core.strategy import Strategy, TrainedModel
from rlhf_testing.models import tiny_model, tiny_tokenizer
from rlhf_testing.samples import make_item


@dataclass
class Setup:
    strategy: Strategy
    algorithm: RolloutAlgorithm
    trained: dict[str, TrainedModel]
    items: list[Any]

    def gradients(self):
        return {
            (role, name): parameter.grad.clone()
            for role, trained in self.trained.items()
            for name, parameter in trained.model.named_parameters()
            if parameter.grad is not None
        }


@pytest.fixture
def setup(make_setup):
    return make_setup()


@pytest.fixture
def make_setup():
    """make_setup(num_items=32, lr=1e-3): the same models and samples each time."""
    from rlhf_ppo.algorithm import PPO
    from rlhf_ppo.config import PPOConfig
    from rlhf_torch.config import SingleConfig
    from rlhf_torch.single import SingleStrategy

    def make(num_items=32, lr=1e-3, **options):
        strategy = SingleStrategy(SingleConfig(), StrategyContext(device="cpu"))
        algorithm = PPO(PPOConfig(kl_coef=0.0, **options))
        policy = tiny_model(seed=1)
        models = {"policy": policy, "critic": algorithm.build_critic(policy)}
        trained = {}
        for role, model in models.items():
            optimizer = strategy.make_optimizer(model.parameters(), lr=lr)
            trained[role] = strategy.prepare(model, optimizer, max_grad_norm=None)
        return Setup(strategy, algorithm, trained, samples(num_items))

    return make


def samples(count):
    """Items of many lengths, ready for an update."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for i in range(count):
        item = make_item(i, num_prompt_tokens=1 + i % 4, num_actions=1 + i * 5 % 7)
        size = item.num_response_tokens
        items.append(
            type(item)(
                **{
                    **{name: getattr(item, name) for name in item.__slots__},
                    "values": torch.randn(size, generator=generator),
                    "advantages": torch.randn(size, generator=generator),
                    "returns": torch.randn(size, generator=generator),
                    "action_log_probs": -torch.rand(size, generator=generator) * 3,
                }
            )
        )
    return items


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()
