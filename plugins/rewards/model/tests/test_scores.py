"""The score is the head's at the last real token, whoever sits beside it in the batch."""

import pytest
import tiny_reward_models as made
import torch

from rlhf_core.components import RewardContext
from rlhf_reward_model.config import ModelRewardConfig
from rlhf_reward_model.reward import build

CPU = RewardContext(device="cpu", seed=0)
ANSWERS = ["", "1", "23", "1,2,3", "999999999", "3,2,1,0", "12", "abcdefghijkl"]


def reward(path, context=CPU, **options):
    return build(ModelRewardConfig(path=path, **options), context)


def alone(model, ids):
    """What transformers says of a sequence without padding."""
    model.config.pad_token_id = None  # else it takes the last token that is not the pad token, which EOS may be
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].tolist()


@pytest.fixture
def rollouts(rollout):
    return [rollout(i, text, finish_reason="length" if i % 3 == 2 else "stop") for i, text in enumerate(ANSWERS)]


def ids_of(rollout):
    return [*rollout.prompt_ids, *rollout.completion_ids]


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_scores_are_those_of_each_sequence_alone_at_its_last_token(save, rollouts, kind, pad_is_eos):
    tokenizer = made.make_tokenizer()
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    model = made.make_model(kind, tokenizer).eval()
    scores = reward(save(model, tokenizer), encoding="tokens", max_batch_tokens=40)(rollouts)
    expected = [alone(model, ids_of(each))[0] for each in rollouts]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len(set(scores)) == len(scores)


@pytest.mark.parametrize("max_batch_tokens", [1, 30, 10_000])
def test_a_score_does_not_depend_on_order_batch_or_budget(save, rollouts, max_batch_tokens):
    tokenizer = made.make_tokenizer()
    path = save(made.make_model("llama", tokenizer), tokenizer)
    whole = reward(path, encoding="tokens")(rollouts)
    scorer = reward(path, encoding="tokens", max_batch_tokens=max_batch_tokens)
    assert scorer(rollouts) == scorer(rollouts)
    assert scorer(rollouts[::-1])[::-1] == pytest.approx(whole, abs=1e-5)
    assert [scorer([each])[0] for each in rollouts] == pytest.approx(whole, abs=1e-5)


def test_batch_invariant_scores_agree_to_the_last_bit(save, rollouts):
    tokenizer = made.make_tokenizer()
    scorer = reward(save(made.make_model("llama", tokenizer), tokenizer), encoding="tokens", max_batch_tokens=1)
    whole = scorer(rollouts)
    assert scorer(rollouts[::-1])[::-1] == whole
    assert [scorer([each])[0] for each in rollouts] == whole


def test_the_label_is_chosen_and_weights_may_be_half(save, rollouts):
    tokenizer = made.make_tokenizer()
    model = made.make_model("bert", tokenizer, labels=3).eval()
    path = save(model, tokenizer)
    scores = reward(path, encoding="tokens", label_index=2)(rollouts)
    assert scores == pytest.approx([alone(model, ids_of(each))[2] for each in rollouts], abs=1e-5)
    half = reward(path, encoding="tokens", label_index=2, dtype="bfloat16")(rollouts)
    assert half == pytest.approx(scores, abs=0.05)
    assert half != scores


def test_nothing_to_score(save):
    tokenizer = made.make_tokenizer()
    assert reward(save(made.make_model("llama", tokenizer), tokenizer))([]) == []


def test_offloaded_scores_are_the_same(save, rollouts):
    tokenizer = made.make_tokenizer()
    path = save(made.make_model("llama", tokenizer), tokenizer)
    assert reward(path, offload=True)(rollouts) == reward(path)(rollouts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_offloaded_weights_come_back_to_the_host(save, rollouts):
    tokenizer = made.make_tokenizer()
    path = save(made.make_model("llama", tokenizer), tokenizer)
    before = torch.cuda.memory_allocated()
    scorer = reward(path, device="cuda", dtype="float32", offload=True)
    scores = scorer(rollouts)
    assert torch.cuda.memory_allocated() == before
    assert scores == pytest.approx(reward(path)(rollouts), abs=1e-4)
    kept = reward(path, device="cuda", dtype="float32")
    assert torch.cuda.memory_allocated() > before
    assert kept(rollouts) == pytest.approx(scores, abs=1e-6)
