"""`reward_model`: neural models, functions, installed rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlhf_core.errors import UserInputError
from rlhf_core.types import Rollout
from rlhf_seed.rewards import NeuralReward, seed_reward
from rlhf_testing.models import tiny_classifier
from rlhf_testing.rollouts import make_rollout

EOS = 2


def rollout(prompt: Sequence[int], completion: Sequence[int]) -> Rollout:
    return replace(make_rollout("", completion_ids=completion), prompt_ids=tuple(prompt))


ROLLOUTS = [rollout([5, 6], [7, EOS]), rollout([5], [8, 9, 10, EOS]), rollout([5, 6, 7], [8])]


def scores_of(model: nn.Module, rollouts: Sequence[Rollout] = ROLLOUTS) -> list[float]:
    return NeuralReward(model, torch.device("cpu"), offload=True, where="reward_model")(rollouts)


@pytest.fixture
def classifier() -> LlamaForSequenceClassification:
    return tiny_classifier()


def test_a_classifier_is_read_at_the_last_real_token(classifier: LlamaForSequenceClassification) -> None:
    expected = []
    for each in ROLLOUTS:
        ids = torch.tensor([each.prompt_ids + each.completion_ids])
        hidden = classifier.model(input_ids=ids).last_hidden_state
        expected.append(float(classifier.score(hidden)[0, -1, 0].detach()))
    assert scores_of(classifier) == pytest.approx(expected, abs=1e-6)
    assert len({round(score, 5) for score in expected}) == 3


class Sums(nn.Module):
    """A module with scores per sequence, per token, or read at the token it takes for the last."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        running = (input_ids * attention_mask).cumsum(1).float()
        last = running.gather(1, (attention_mask.sum(1, keepdim=True) - 1).long())
        return {"tokens": running, "sequence": running[:, -1], "column": running[:, -1:], "found": last}[self.form]


@pytest.mark.parametrize("form", ["tokens", "sequence", "column", "found"])
def test_any_module_that_returns_scores(form: str) -> None:
    assert scores_of(Sums(form)) == [20.0, 34.0, 26.0]


def test_a_model_of_several_labels_is_no_reward_model(classifier: LlamaForSequenceClassification) -> None:
    classifier.score = nn.Linear(16, 3, bias=False)
    with pytest.raises(ValueError, match="3 labels"):
        scores_of(classifier)


class RLVRRewardModel:
    """The seed's reward model of verifiable rewards: its signature and what it asks of its functions, written anew."""

    def __init__(self, reward_fn_list: list[Any], **kwargs: Any) -> None:
        self.functions, self.options = reward_fn_list, kwargs

    def __call__(
        self,
        input_ids: torch.LongTensor,
        attention_mask: Tensor | None = None,
        response_start: list[Any] | None = None,
        response_end: list[Any] | None = None,
        gt_answer: list[Any] | None = None,
    ) -> Tensor:
        assert attention_mask is not None and response_start is not None
        assert response_end is not None and gt_answer is not None
        rewards = torch.zeros(input_ids.size(0), device=input_ids.device)
        for row in range(input_ids.size(0)):
            places = {"response_start": response_start[row], "response_end": response_end[row]}
            for function in self.functions:
                rewards[row] += function(
                    input_ids[row], attention_mask[row], **places, gt_answer=gt_answer[row], **self.options
                )
        return rewards


def contains_answer(input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
    """As the seed's functions are written: one row, its response cut out by its places."""
    answer = input_ids[kwargs["response_start"] : kwargs["response_end"]]
    assert attention_mask.sum() == kwargs["response_end"]
    assert kwargs["separator"] == ","
    return torch.tensor(float(kwargs["separator"].join(map(str, answer.tolist())) == kwargs["gt_answer"]))


def half_a_point(input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> float:
    return 0.5


def scored(reward: object, rollouts: Sequence[Rollout]) -> list[float]:
    function = seed_reward(reward, torch.device("cpu"), offload=True, seed=0, where="reward_model").function
    assert function is not None
    return list(function(rollouts))


def test_the_seeds_verifiable_reward_is_called_as_the_seed_calls_it() -> None:
    rollouts = [replace(each, answer=answer) for each, answer in zip(ROLLOUTS, ("7,2", "8,9,10,2", "9"), strict=True)]
    reward = RLVRRewardModel([contains_answer, half_a_point], separator=",")
    assert scored(reward, rollouts) == [1.5, 1.5, 0.5]


def test_a_callable_gets_those_of_the_seeds_arguments_that_it_takes() -> None:
    def lengths(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return attention_mask.sum(1, keepdim=True)

    assert scored(lengths, ROLLOUTS) == [4.0, 5.0, 4.0]
    with pytest.raises(ValueError, match="3 labels"):
        scored(lambda input_ids: torch.zeros(len(input_ids), 1, 3), ROLLOUTS)


def test_a_callable_that_fits_neither_way_is_refused() -> None:
    def of_texts(prompts: list[str], completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    def of_more(input_ids: Tensor, tokenizer: Any) -> Tensor:
        return input_ids.sum(1)

    for function, missing in ((of_texts, "completions"), (of_more, "tokenizer")):
        with pytest.raises(UserInputError, match=missing):
            scored(function, ROLLOUTS)


def test_functions_and_names() -> None:
    def lengths(rollouts: Sequence[Rollout], *, scale: float) -> list[float]:
        return [scale * len(each.completion_ids) for each in rollouts]

    device = torch.device("cpu")
    with pytest.raises(UserInputError, match="scale"):
        seed_reward(lengths, device, offload=True, seed=0, where="reward_model")
    assert seed_reward("length", device, offload=True, seed=0, where="reward_model").name == "length"
    with pytest.raises(UserInputError, match="cannot score"):
        seed_reward(None, device, offload=True, seed=0, where="reward_model")


def test_the_models_config_stays_as_it_was(classifier: LlamaForSequenceClassification) -> None:
    scores_of(classifier)
    assert classifier.config.pad_token_id == EOS


def test_a_model_with_an_adapter_is_read_like_the_one_below(classifier: LlamaForSequenceClassification) -> None:
    expected = scores_of(classifier)  # a new adapter changes nothing
    adapted = get_peft_model(classifier, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    assert scores_of(adapted) == pytest.approx(expected, abs=1e-6)


class ReadsTheFirst(nn.Module):
    """As encoders do, and its score shows the width it was given."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return input_ids[:, 0].float() + input_ids.shape[1] / 10


def test_a_module_that_finds_its_place_by_itself_gets_no_padding() -> None:
    assert scores_of(ReadsTheFirst()) == pytest.approx([5.4, 5.5, 5.4])


class TwoLabels(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return torch.zeros(len(input_ids), 2)


def test_labels_are_no_scores() -> None:
    with pytest.raises(ValueError, match="2 labels"):
        scores_of(TwoLabels())
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    with pytest.raises(UserInputError, match="3 labels"):
        scores_of(LlamaForSequenceClassification(config))
    with pytest.raises(TypeError, match="returned dict"):
        scores_of(Returns())


class Returns(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"score": input_ids}


def test_a_function_stays_itself() -> None:
    def brevity(rollouts: Sequence[Rollout]) -> list[float]:
        return [0.0 for _ in rollouts]

    spec = seed_reward(brevity, torch.device("cpu"), offload=False, seed=0, where="model_fn")
    assert spec.function is brevity and spec.name == "brevity"
    with pytest.raises(UserInputError, match="model_fn: .*reward model"):
        seed_reward(3, torch.device("cpu"), offload=False, seed=0, where="model_fn")
