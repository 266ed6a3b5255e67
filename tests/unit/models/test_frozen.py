"""Frozen models that a run cannot have: not there, or with other tokens than the policy."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_core.algorithm import FrozenModel
from rlhf_core.errors import UserInputError
from rlhf_core.wiring.models import check_frozen, place_frozen
from rlhf_testing.models import builtin_model, tiny_model, tiny_tokenizer


def saved(folder, characters):
    tokenizer = tiny_tokenizer(characters)
    tiny_model(tokenizer, hidden_size=16, num_layers=1, num_heads=2, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def check(teacher, tokenizer):
    check_frozen(SimpleNamespace(frozen_models={"teacher": teacher}), tokenizer)


def test_another_tokenizer_is_refused_by_its_first_token(tmp_path):
    _, ours = builtin_model("builtin:tiny-digits", 0)
    check(FrozenModel("builtin:tiny-digits"), ours)
    known = "".join(token for token in sorted(ours.get_vocab(), key=ours.get_vocab().get) if len(token) == 1)
    check(FrozenModel(saved(tmp_path / "more", known + "xyz")), ours)
    with pytest.raises(UserInputError, match=r"algorithm\.teacher\.path: .* has a different tokenizer .* first is '0'"):
        check(FrozenModel(saved(tmp_path / "other", known[::-1])), ours)
    with pytest.raises(UserInputError, match=r"tokens differ, the first is .* missing in this model"):
        check(FrozenModel(saved(tmp_path / "fewer", known[:4])), ours)
    check(FrozenModel(saved(tmp_path / "encoded by its pass", known[:4]), own_tokenizer=True), ours)


def test_a_model_that_is_not_there(setup, tmp_path):
    _, ours = builtin_model("builtin:tiny-digits", 0)
    with pytest.raises(UserInputError, match=r"algorithm\.teacher\.path: there is no folder"):
        check(FrozenModel("./no-such-folder"), ours)
    with pytest.raises(UserInputError, match=r"algorithm\.teacher\.path"):
        place_frozen("teacher", FrozenModel(str(tmp_path)), setup.strategy, dtype=torch.float32, seed=0)
