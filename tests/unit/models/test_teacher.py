"""What a teacher says of sampled tokens, and a teacher that knows other tokens."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf_core.algorithm import Teacher
from rlhf_core.batching import collate
from rlhf_core.config.sections import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_core.models.builtin import build_builtin, build_character_tokenizer, build_llama
from rlhf_core.models.reference_pass import ReferencePass
from rlhf_core.models.teacher import TeacherModel, check_teacher, load_teacher
from rlhf_core.testing.models import tiny_model
from rlhf_core.testing.samples import make_group


@pytest.fixture
def groups():
    return [make_group(position, 2, num_actions=1 + position * 3 % 7) for position in range(5)]


@pytest.mark.parametrize("batch_tokens", [None, 13])
@pytest.mark.parametrize("top_k", [0, 4])
def test_it_equals_a_forward_of_each_sample_alone(setup, groups, top_k, batch_tokens):
    model = tiny_model(seed=9).eval()
    teacher = TeacherModel(model, top_k=top_k, vocabulary=10)
    done = ReferencePass(setup.strategy, temperature=0.7, teacher=teacher, batch_tokens=batch_tokens).run(groups)
    for item in (item for group in done for item in group.items):
        ids = torch.cat([item.prompt_ids, item.response_ids])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double() / 0.7
        for t in range(item.num_response_tokens):
            expected = logits[len(item.prompt_ids) + t - 1].log_softmax(-1)
            if not top_k:
                assert item.teacher_ids is None and item.teacher_log_probs.shape == (item.num_response_tokens, 1)
                sampled = expected[item.response_ids[t]].item()
                assert item.teacher_log_probs[t, 0].item() == pytest.approx(sampled, abs=1e-5)
                continue
            found = item.teacher_ids[t].tolist()
            assert item.teacher_ids.dtype == torch.int32 and len(set(found)) == 4
            assert sorted(found) == sorted(expected[:10].topk(4).indices.tolist()), "of the known tokens alone"
            assert item.teacher_log_probs[t].tolist() == pytest.approx(expected[found].tolist(), abs=1e-5)


def test_both_fields_are_batched_and_split(setup, groups):
    from rlhf_core.batching import split

    teacher = TeacherModel(tiny_model(seed=9).eval(), top_k=3, vocabulary=10)
    items = [item for group in ReferencePass(setup.strategy, temperature=1.0, teacher=teacher).run(groups)
             for item in group.items]  # fmt: skip
    batch = collate(items)
    assert batch.teacher_ids.shape == batch.teacher_log_probs.shape == (10, batch.num_actions, 3)
    for before, after in zip(items, split(batch), strict=True):
        assert torch.equal(before.teacher_ids, after.teacher_ids) and after.teacher_ids.dtype == torch.int32
        assert torch.equal(before.teacher_log_probs, after.teacher_log_probs)
    with pytest.raises(ValueError, match="`teacher_ids` is there for some samples"):
        collate([items[0], replace(items[1], teacher_ids=None)])


def test_an_offloaded_teacher_is_on_the_device_for_its_pass_only(setup, groups, monkeypatch):
    model, places = tiny_model(seed=9).eval(), []
    monkeypatch.setattr(type(model), "to", lambda self, device: places.append(str(device)))
    teacher = TeacherModel(model, top_k=0, vocabulary=10, offload=True)
    ReferencePass(setup.strategy, temperature=0.7, teacher=teacher).run(groups)
    assert places == [str(setup.strategy.device), "cpu"]


def saved(folder, characters):
    tokenizer = build_character_tokenizer(characters)
    build_llama(tokenizer, hidden_size=16, num_layers=1, num_heads=2, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_another_tokenizer_is_refused_by_its_first_token(tmp_path):
    _, ours = build_builtin("builtin:tiny-digits", 0)
    check_teacher(Teacher("builtin:tiny-digits"), ours)
    known = "".join(token for token in sorted(ours.get_vocab(), key=ours.get_vocab().get) if len(token) == 1)
    check_teacher(Teacher(saved(tmp_path / "more", known + "xyz")), ours)
    with pytest.raises(UserInputError, match=r"algorithm\.teacher\.path: .* has another tokenizer .* first is '0'"):
        check_teacher(Teacher(saved(tmp_path / "other", known[::-1])), ours)
    with pytest.raises(UserInputError, match=r"tokens differ, the first is .* absent there"):
        check_teacher(Teacher(saved(tmp_path / "fewer", known[:4])), ours)


def test_a_teacher_that_is_not_there(tmp_path):
    _, ours = build_builtin("builtin:tiny-digits", 0)
    with pytest.raises(UserInputError, match=r"algorithm\.teacher\.path: there is no folder"):
        check_teacher(Teacher("./no-such-folder"), ours)
    with pytest.raises(UserInputError, match=r"algorithm\.top_k: is 99, the tokenizer has 16 tokens"):
        check_teacher(Teacher("builtin:tiny-digits", top_k=99), ours)
    with pytest.raises(UserInputError, match=r"algorithm\.teacher\.path"):
        load_teacher(Teacher(str(tmp_path)), ModelConfig(path="builtin:tiny-digits"), dtype=torch.float32, seed=0)


def test_log_probs_of_a_whole_vocabulary_sum_to_one(setup, groups):
    model = tiny_model(seed=9).eval()
    size = model.config.vocab_size
    teacher = TeacherModel(model, top_k=size, vocabulary=size)
    (first, *_) = ReferencePass(setup.strategy, temperature=1.0, teacher=teacher).run(groups)
    assert math.isclose(float(first.items[0].teacher_log_probs[0].exp().sum()), 1.0, abs_tol=1e-5)
