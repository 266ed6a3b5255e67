"""One update, however it is cut up, is the same update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.batching import masked
from rlhf_core.strategy import Strategy, TrainedModel
from rlhf_core.training.updater import Updater
from rlhf_core.types import BufferItem
from rlhf_ppo import Critic
from rlhf_ppo.algorithm import PPO
from rlhf_ppo.config import PPOConfig

Gradients = dict[str, Tensor]


@pytest.fixture
def gradients_of(
    actor: Any, make_strategy: Callable[..., Strategy], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, float], Gradients]]:
    """gradients_of(items, config, **updater options) -> losses, and the gradients the optimizer would step on."""
    critic = Critic.from_pretrained(actor)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(3))
    strategy = make_strategy()
    trained = {
        role: strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for role, model in (("policy", actor), ("critic", critic))
    }

    def measure(items: Sequence[BufferItem], config: PPOConfig, **options: Any) -> tuple[dict[str, float], Gradients]:
        gradients: Gradients = {}

        def keep(each: TrainedModel) -> float:
            role = next(name for name, known in trained.items() if known is each)
            for name, parameter in each.model.named_parameters():
                if parameter.grad is not None:
                    gradients[f"{role}.{name}"] = parameter.grad.clone()
            each.optimizer.zero_grad(set_to_none=True)
            return 0.0

        monkeypatch.setattr(strategy, "step", keep)
        algorithm = PPO(config, max_new_tokens=8)
        metrics = Updater(algorithm, strategy, trained, **options).update(items)
        return {name: value for name, value in metrics.items() if name.startswith("loss/")}, gradients

    return measure


def assert_same(ours: tuple[dict[str, float], Gradients], theirs: tuple[dict[str, float], Gradients]) -> None:
    """Losses and gradients agree to 1e-6, relative to the norm of the whole."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    for role in ("policy", "critic"):
        names = [name for name in ours[1] if name.startswith(role)]
        difference = torch.cat([(ours[1][name] - theirs[1][name]).flatten() for name in names])
        whole = torch.cat([theirs[1][name].flatten() for name in names])
        assert whole.norm() > 1e-3
        assert float(difference.norm() / whole.norm()) < 1e-6


AGGREGATIONS = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", [{"micro_batch_size": 8}, {"micro_batch_tokens": 24}, {"micro_batch_size": 5}])
def test_micro_batches_do_not_change_the_update(
    gradients_of: Callable[..., Any],
    make_items: Callable[..., list[BufferItem]],
    aggregation: Any,
    split: dict[str, int],
) -> None:
    items = make_items(32)
    config = PPOConfig(aggregation=aggregation, entropy_coef=0.01, kl_in="loss", kl_estimator="k3")
    assert_same(gradients_of(items, config, **split), gradients_of(items, config))


def test_a_stand_in_that_counts_for_nothing_changes_nothing(
    gradients_of: Callable[..., Any], make_items: Callable[..., list[BufferItem]]
) -> None:
    items = make_items(6)
    config = PPOConfig(entropy_coef=0.01, kl_in="loss", kl_estimator="k3")
    assert_same(gradients_of([*items, masked(items[0])], config, micro_batch_size=3), gradients_of(items, config))


def test_padding_does_not_change_the_update(
    gradients_of: Callable[..., Any], make_items: Callable[..., list[BufferItem]]
) -> None:
    """Alone (micro-batches of one) nothing is padded; together nearly everything is."""
    items = make_items(9, seed=5)
    config = PPOConfig()
    assert_same(gradients_of(items, config, micro_batch_size=1), gradients_of(items, config))


def test_only_what_counts_is_divided_by(
    gradients_of: Callable[..., Any], make_items: Callable[..., list[BufferItem]]
) -> None:
    """A truncated answer is an answer: its last token is an action like any other, and nothing follows it."""
    items = make_items(4)
    config = PPOConfig()
    truncated = [replace(item, truncated=True) for item in items]
    assert_same(gradients_of(truncated, config), gradients_of(items, config))
