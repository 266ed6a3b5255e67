"""What a prompt loader may give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import DataError
from rlhf_ppo.prompt_batches import CycledLoader, read_prompts


def test_token_batches_lose_their_padding_whatever_the_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    # 2 is EOS: a real one in the second prompt, padding in the first.
    batch = {
        "input_ids": torch.tensor([[2, 2, 5, 6], [7, 2, 8, 14]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        "gt_answer": ["12", "34"],
        "level": torch.tensor([1, 3]),
    }
    first, second = read_prompts(batch, tokenizer, first_position=40)
    assert (first.prompt_ids, second.prompt_ids) == ((5, 6), (7, 2, 8, 14))
    assert (first.position, second.position) == (40, 41)
    assert (first.text, second.text) == ("12", "34>")
    assert (first.answer, second.answer) == ("12", "34")
    assert second.metadata == {"level": 3}


@pytest.mark.parametrize(
    "batch",
    [
        [{"prompt": "12>", "answer": "12", "level": 1}, {"prompt": "3>", "answer": "3", "level": 2}],
        {"prompt": ["12>", "3>"], "answer": ["12", "3"], "level": [1, 2]},
    ],
)
def test_records(tokenizer: PreTrainedTokenizerBase, batch: Any) -> None:
    first, second = read_prompts(batch, tokenizer, first_position=0)
    assert first.prompt_ids == (5, 6, 14) and second.text == "3>"
    assert second.answer == "3" and second.metadata == {"level": 2}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.ones(2, 3)}, "no attention_mask"),
        ({"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 2)}, "should both be"),
        ({"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3), "gt_answer": ["1"]}, "gt_answer"),
        (torch.ones(2, 3), "hold no prompts"),
        ([{"text": "12"}], "no `prompt`"),
    ],
)
def test_what_is_no_prompt_is_named(tokenizer: PreTrainedTokenizerBase, batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_prompts(batch, tokenizer, 0)


def test_a_loader_starts_again_and_goes_on_after_a_resume() -> None:
    endless = CycledLoader(["a", "b", "c"], where="loader")
    assert [next(endless) for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert endless.num_taken == 5
    resumed = CycledLoader(["a", "b", "c"], where="loader", skip=5)
    assert [next(resumed) for _ in range(2)] == ["c", "a"]
    assert resumed.num_taken == 7
    with pytest.raises(DataError, match="loader: gives no batch"):
        next(CycledLoader([], where="loader"))
