"""`reward_model`: neural models, functions, installed rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlhf_core.errors import UserInputError
from rlhf_core.types import Rollout
from rlhf_ppo import Critic, PPOTrainer
from rlhf_ppo.seed_rewards import NeuralReward, seed_reward

EOS = 2


def rollout(prompt: Sequence[int], completion: Sequence[int]) -> Rollout:
    return Rollout(
        sample_id=0,
        prompt="",
        messages=None,
        prompt_ids=tuple(prompt),
        completion="",
        completion_ids=tuple(completion),
        logprobs=(0.0,) * len(completion),
        answer=None,
        metadata={},
        policy_version=0,
        finish_reason="stop",
    )


ROLLOUTS = [rollout([5, 6], [7, EOS]), rollout([5], [8, 9, 10, EOS]), rollout([5, 6, 7], [8])]


def scores_of(model: nn.Module, rollouts: Sequence[Rollout] = ROLLOUTS) -> list[float]:
    return NeuralReward(model, torch.device("cpu"), offload=True)(rollouts)


@pytest.fixture
def classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=EOS,  # the case that transformers' own pooling gets wrong
        eos_token_id=EOS,
    )
    return LlamaForSequenceClassification(config).eval()


def test_a_classifier_is_read_at_the_last_real_token(classifier: LlamaForSequenceClassification) -> None:
    expected = []
    for each in ROLLOUTS:
        ids = torch.tensor([each.prompt_ids + each.completion_ids])
        hidden = classifier.model(input_ids=ids).last_hidden_state
        expected.append(float(classifier.score(hidden)[0, -1, 0].detach()))
    assert scores_of(classifier) == pytest.approx(expected, abs=1e-6)
    assert len({round(score, 5) for score in expected}) == 3


class Sums(nn.Module):
    """A module with scores per sequence, per token, or in an object with logits."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        running = (input_ids * attention_mask).cumsum(1).float()
        return {"tokens": running, "sequence": running[:, -1], "column": running[:, -1:]}[self.form]


@pytest.mark.parametrize("form", ["tokens", "sequence", "column"])
def test_any_module_that_returns_scores(form: str) -> None:
    assert scores_of(Sums(form)) == [20.0, 34.0, 26.0]


def test_a_critic_is_a_reward_model(actor: Any) -> None:
    critic = Critic.from_pretrained(actor)
    nn.init.normal_(critic.value_head.weight)
    alone = [scores_of(critic, [each])[0] for each in ROLLOUTS]
    assert scores_of(critic) == pytest.approx(alone, abs=1e-6)


def test_a_model_of_several_labels_is_no_reward_model(classifier: LlamaForSequenceClassification) -> None:
    classifier.score = nn.Linear(16, 3, bias=False)
    with pytest.raises(ValueError, match="3 labels"):
        scores_of(classifier)


def test_functions_and_names() -> None:
    def lengths(rollouts: Sequence[Rollout], *, scale: float) -> list[float]:
        return [scale * len(each.completion_ids) for each in rollouts]

    device = torch.device("cpu")
    with pytest.raises(UserInputError, match="scale"):
        seed_reward(lengths, device, offload=True, seed=0)
    assert seed_reward("length", device, offload=True, seed=0).name == "length"
    with pytest.raises(UserInputError, match="cannot score"):
        seed_reward(None, device, offload=True, seed=0)


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
