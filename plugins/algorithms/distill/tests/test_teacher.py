"""What a teacher says of sampled tokens."""

import math

import pytest
import torch

from rlhf_core.algorithm import FrozenModel
from rlhf_core.batching import collate, split
from rlhf_core.errors import ConfigError
from rlhf_core.models import GroupPasses
from rlhf_core.place import LocalPlace
from rlhf_distill.question import Teacher
from rlhf_distill.teacher import TeacherPass
from rlhf_testing.models import tiny_model
from rlhf_testing.samples import make_group

ONE = {"teacher": Teacher("algorithm.teacher", "teacher")}


@pytest.fixture
def groups():
    return [make_group(position, 2, num_actions=1 + position * 3 % 7) for position in range(5)]


def taught(model, groups, *, top_k, vocabulary=10, temperature=0.7, batch_tokens=None, offload=False):
    """The items of the groups, behind the pass."""

    place = LocalPlace(torch.device("cpu"), torch.float32)
    passes = GroupPasses(
        place,
        {"teacher": model},
        lambda context: [TeacherPass(context, ONE, top_k=top_k, vocabulary=vocabulary)],
        temperature=temperature,
        batch_tokens=batch_tokens,
        offloaded={"teacher"} if offload else (),
    )
    return [item for group in passes.run(groups) for item in group.items]


@pytest.mark.parametrize("batch_tokens", [None, 13])
@pytest.mark.parametrize("top_k", [0, 4])
def test_it_equals_a_forward_of_each_sample_alone(groups, top_k, batch_tokens):
    model = tiny_model(seed=9).eval()
    for item in taught(model, groups, top_k=top_k, batch_tokens=batch_tokens):
        ids = torch.cat([item.prompt_ids, item.response_ids])
        log_probs = item.columns["teacher_log_probs"]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double() / 0.7
        for t in range(item.num_response_tokens):
            expected = logits[len(item.prompt_ids) + t - 1].log_softmax(-1)
            if not top_k:
                assert "teacher_ids" not in item.columns and log_probs.shape == (item.num_response_tokens, 1)
                assert log_probs[t, 0].item() == pytest.approx(expected[item.response_ids[t]].item(), abs=1e-5)
                continue
            found = item.columns["teacher_ids"][t].tolist()
            assert item.columns["teacher_ids"].dtype == torch.int32 and len(set(found)) == 4
            assert sorted(found) == sorted(expected[:10].topk(4).indices.tolist()), "of the known tokens alone"
            rest = expected.exp().sum() - expected[found].exp().sum()
            assert log_probs[t].tolist() == pytest.approx([*expected[found].tolist(), math.log(rest)], abs=1e-5)


def test_both_columns_are_batched_and_split(groups):
    items = taught(tiny_model(seed=9).eval(), groups, top_k=3)
    batch = collate(items)
    assert batch.columns["teacher_ids"].shape == (10, batch.num_actions, 3)
    assert batch.columns["teacher_log_probs"].shape == (10, batch.num_actions, 4)
    for before, after in zip(items, split(batch), strict=True):
        for name in ("teacher_ids", "teacher_log_probs"):
            assert torch.equal(before.columns[name], after.columns[name])


def test_an_offloaded_teacher_is_on_the_device_for_its_pass_only(groups, monkeypatch):
    model, places = tiny_model(seed=9).eval(), []
    monkeypatch.setattr(type(model), "to", lambda self, device: places.append(str(device)))
    taught(model, groups, top_k=0, offload=True)
    assert places == ["cpu", "cpu"]


def test_log_probs_of_a_whole_vocabulary_sum_to_one(groups):
    model = tiny_model(seed=9).eval()
    size = model.config.vocab_size
    first, *_ = taught(model, groups, top_k=size, vocabulary=size, temperature=1.0)
    assert math.isclose(float(first.columns["teacher_log_probs"][0].exp().sum()), 1.0, abs_tol=1e-5)


def test_the_model_is_declared_for_core_to_place(algorithm):
    given = algorithm({"teacher": {"path": "builtin:tiny-digits", "dtype": "bfloat16", "offload": True}})
    assert given.frozen_models == {"teacher": FrozenModel("builtin:tiny-digits", dtype="bfloat16", offload=True)}


def test_more_tokens_than_there_are(algorithm):
    with pytest.raises(ConfigError, match=r"algorithm\.top_k: is 999, but the tokenizer has \d+ tokens"):
        algorithm({"top_k": 999})
