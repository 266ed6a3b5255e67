"""`reward_model` of `PPOTrainer`; what it may be is tested with `libraries/seed/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForSequenceClassification

from rlhf_core.types import Rollout
from rlhf_ppo import Critic, PPOTrainer
from rlhf_seed.rewards import NeuralReward
from rlhf_testing.models import tiny_classifier
from rlhf_testing.rollouts import make_rollout

EOS = 2


@pytest.fixture
def classifier() -> LlamaForSequenceClassification:
    return tiny_classifier()


def test_a_critic_is_a_reward_model(actor: Any) -> None:
    critic = Critic.from_pretrained(actor)
    nn.init.normal_(critic.value_head.weight)
    score = NeuralReward(critic, torch.device("cpu"), offload=True, where="reward_model")
    answers = [((5, 6), (7, EOS)), ((5,), (8, 9, 10, EOS)), ((5, 6, 7), (8,))]
    rollouts = [replace(make_rollout("", completion_ids=answer), prompt_ids=prompt) for prompt, answer in answers]
    alone = [score([each])[0] for each in rollouts]
    assert score(rollouts) == pytest.approx(alone, abs=1e-6)
    with torch.no_grad():
        ids = torch.tensor([[5, 8, 9, 10, EOS]])
        assert alone[1] == pytest.approx(float(critic(ids, torch.ones_like(ids))[0, -1]), abs=1e-6)


def test_training_with_a_neural_reward_leaves_it_as_it_was(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, classifier: LlamaForSequenceClassification
) -> None:
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    make_trainer(reward_model=classifier).fit(1, 1, 1, prompt_loader)
    assert all(torch.equal(tensor, before[name]) for name, tensor in classifier.state_dict().items())


def test_a_verifiable_reward_gets_the_answer(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any) -> None:
    seen: list[Any] = []

    def right(rollouts: Sequence[Rollout]) -> list[float]:
        seen.extend((each.prompt, each.answer) for each in rollouts)
        return [float(each.completion == each.answer) for each in rollouts]

    answers = [f"answer {index}" for index in range(8)]
    make_trainer(reward_model=right).fit(1, 1, 1, [{**prompt_loader[0], "gt_answer": answers}])
    assert sorted(answer for _, answer in seen) == answers
    assert sorted(prompt for prompt, _ in seen)[0] == "00>"
