"""A reward model that cannot be loaded is an error at once, before anything is built or retried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from rlhf_core.errors import UserInputError
from rlhf_reward_model.loading import load
from rlhf_testing.models import tiny_classifier, tiny_tokenizer


@pytest.mark.usefixtures("no_hub")
def test_an_unreachable_hub_is_told_before_any_file_is_asked_for() -> None:
    with pytest.raises(UserInputError, match="reward .model.: .*neither a local folder nor in the cache"):
        load("no-such-owner/no-such-model", torch.float32, None)


@pytest.mark.parametrize("layers", [-1, 10**9])
def test_a_count_of_layers_that_no_model_has_is_refused(tmp_path: Path, layers: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
    with pytest.raises(UserInputError, match="between 0 and 2,000 layers"):
        load(str(tmp_path), torch.float32, None)


def test_an_adapter_of_a_reward_model_scores_as_it_does(tmp_path: Path) -> None:
    base, adapter = tiny_classifier(), tmp_path / "adapter"
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(adapter)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(classifier, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained(adapter)
    _, model, _ = load(str(adapter), torch.float32, None)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(model(ids).logits, adapted(ids).logits)
    assert not torch.equal(model(ids).logits, base(ids).logits)
