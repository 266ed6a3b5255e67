"""Scores of the steps of an answer and of the turns of an episode, and one number of them."""

import math
from dataclasses import replace

import pytest
import tiny_reward_models as made
import torch

from rlhf_core.components import RewardContext
from rlhf_core.errors import UserInputError
from rlhf_core.types import Turn
from rlhf_reward_model.config import ModelRewardConfig
from rlhf_reward_model.reward import build
from rlhf_reward_model.steps import combine, split_steps


@pytest.fixture
def model_and_path(save):
    tokenizer = made.make_tokenizer()
    model = made.make_model("llama", tokenizer).eval()
    return model, save(model, tokenizer)


def reward(path, model_path=None, **options):
    return build(ModelRewardConfig(path=path, **options), RewardContext(device="cpu", seed=0, model_path=model_path))


def logit(model, ids):
    """What transformers says at the end of a sequence without padding."""
    model.config.pad_token_id = None
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


@pytest.mark.parametrize("max_batch_tokens", [1, 10_000])
def test_each_step_is_read_at_its_separator(model_and_path, rollout, max_batch_tokens):
    model, path = model_and_path
    tokenizer = made.make_tokenizer()
    answers = ["1,23,4", "", "99", "a,b,c,d,"]
    scorer = reward(path, steps="min", step_separator=",", max_batch_tokens=max_batch_tokens)
    found = scorer.logits([rollout(i, text) for i, text in enumerate(answers)])
    for text, scores in zip(answers, found, strict=True):
        parts = [part for part in text.split(",") if part]
        prefixes = ["312>" + "".join(part + "," for part in parts[: n + 1]) for n in range(len(parts))]
        assert scores == pytest.approx([logit(model, tokenizer(each)["input_ids"]) for each in prefixes], abs=1e-5)
    chances = [[1 / (1 + math.exp(-x)) for x in scores] for scores in found]
    expected = [min(each, default=0.0) for each in chances]
    assert scorer([rollout(i, text) for i, text in enumerate(answers)]) == pytest.approx(expected, abs=1e-6)


def episode(rollout, tokenizer):
    """Two turns of the policy with an observation between them."""
    said = [("policy", "12", [*tokenizer("12")["input_ids"], tokenizer.eos_token_id]),
            ("environment", "no", tokenizer("no")["input_ids"]),
            ("policy", "3", [*tokenizer("3")["input_ids"], tokenizer.eos_token_id])]  # fmt: skip
    turns = tuple(
        Turn(role=role, text=text, token_ids=tuple(ids), logprobs=(0.0,) * len(ids)) for role, text, ids in said
    )
    ids = tuple(token for _, _, own in said for token in own)
    return replace(rollout(0, "12\n3"), turns=turns, completion_ids=ids, logprobs=(0.0,) * len(ids))


def test_a_turn_of_an_episode_is_a_step(model_and_path, rollout):
    model, path = model_and_path
    tokenizer = made.make_tokenizer()
    played = episode(rollout, tokenizer)
    (scores,) = reward(path, model_path=path, steps="mean").logits([played])
    ids, ends = [*played.prompt_ids, *played.completion_ids], (3, 7)  # after the prompt: "12" and EOS; "no", "3", EOS
    expected = [logit(model, ids[: len(played.prompt_ids) + end]) for end in ends]
    assert scores == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="sample 0 has several turns, but the reward model has another tokenizer"):
        reward(path, steps="mean")([played])


def test_each_turn_earns_its_part_of_the_mean(model_and_path, rollout):
    _, path = model_and_path
    played = episode(rollout, made.make_tokenizer())
    scorer = reward(path, model_path=path, steps="turns", step_separator=",")
    (logits,) = scorer.logits([played])
    (found, alone) = scorer([played, rollout(1, "1,2,")])
    assert found == pytest.approx({turn: 1 / (1 + math.exp(-x)) / 2 for turn, x in enumerate(logits)})
    plain = reward(path, model_path=path, steps="mean", step_separator=",")
    assert [sum(found.values()), alone] == pytest.approx(plain([played, rollout(1, "1,2,")]))


def test_one_number_of_several():
    logits = [2.0, -1.0, 0.5]
    chances = [1 / (1 + math.exp(-x)) for x in logits]
    assert combine(logits, "min") == pytest.approx(chances[1])
    assert combine(logits, "mean") == pytest.approx(sum(chances) / 3)
    assert combine(logits, "product") == pytest.approx(math.prod(chances))
    assert combine(logits, "last") == pytest.approx(chances[2])
    assert combine([], "product") == 0.0 and combine([1e9, -1e9], "min") == pytest.approx(0.0, abs=1e-30)


def test_steps_of_a_text():
    assert split_steps("a\n\nb \n", "\n") == ["a", "b "]
    assert split_steps("312", "") == ["3", "1", "2"]


def test_a_model_that_pools_reads_no_steps(save):
    tokenizer = made.make_tokenizer()
    path = save(made.make_model("bert", tokenizer), tokenizer)
    with pytest.raises(UserInputError, match="does not read single tokens"):
        reward(path, steps="min")


def test_a_sample_that_is_too_long(model_and_path, rollout):
    _, path = model_and_path
    with pytest.raises(ValueError, match=r"sample 0 is \d+ tokens long, the reward model reads 16"):
        reward(path, steps="min", max_tokens=16)([rollout(0, "1" * 30)])
