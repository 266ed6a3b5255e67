"""What a prompt loader may give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import DataError
from rlhf_core.types import Prompt
from rlhf_seed.prompts import BatchReader


def read_prompts(batch: Any, tokenizer: PreTrainedTokenizerBase, first_position: int) -> list[Prompt]:
    return BatchReader(tokenizer, tokenizer, needs_mask=True).read(batch, first_position, "batch 7")


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
        ({"input_ids": torch.ones(2, 3)}, "without attention_mask"),
        ({"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 2)}, "must have the same shape"),
        ({"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3), "gt_answer": ["1"]}, "gt_answer"),
        (torch.ones(2, 3), "without attention_mask"),
        ({"input_ids": torch.ones(3), "attention_mask": torch.ones(3)}, "must have the same shape"),
        ({"input_ids": torch.ones(2, 3), "attention_mask": torch.zeros(2, 3)}, "0 tokens"),
        ({"prompt": "12>"}, "`prompt` is not one value"),
        ({"text": ["12"]}, "lacks `prompt`"),
        (3, "contains no prompts"),
        ("12", "contains no prompts"),
        ([], "contains no prompts"),
        ([{"text": "12"}], "`prompt` is missing"),
    ],
)
def test_what_is_no_prompt_is_named(tokenizer: PreTrainedTokenizerBase, batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(batch, tokenizer, 0)
    assert str(caught.value).startswith("batch 7")


class Words:
    """A tokenizer of digits that are their own ids."""

    chat_template = None

    def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(c) for c in text] for text in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(str, ids))


class TestWithoutMasks:
    def read(self, batch: object) -> list[tuple[str, tuple[int, ...], object, dict[str, object]]]:
        reader = BatchReader(Words(), Words(), needs_mask=False)  # type: ignore[arg-type]
        prompts = reader.read(batch, 30, "batch 7")
        assert [prompt.position for prompt in prompts] == list(range(30, 30 + len(prompts)))
        return [(p.text, p.prompt_ids, p.answer, dict(p.metadata)) for p in prompts]

    def test_padding_on_either_side_is_taken_off(self) -> None:
        batch = {
            "input_ids": torch.tensor([[0, 0, 1, 2], [3, 4, 5, 0]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]),
            "answer": ["x", "y"],
            "level": torch.tensor([1, 2]),
        }
        assert self.read(batch) == [("12", (1, 2), "x", {"level": 1}), ("345", (3, 4, 5), "y", {"level": 2})]

    def test_a_tensor_texts_and_records(self) -> None:
        assert self.read(torch.tensor([[1, 2]])) == [("12", (1, 2), None, {})]
        assert self.read(["12", "3"]) == [("12", (1, 2), None, {}), ("3", (3,), None, {})]
        assert self.read([{"prompt": "12", "answer": 4, "k": 5}]) == [("12", (1, 2), 4, {"k": 5})]
        assert self.read([{"input_ids": [1, 2], "prompt": "one two"}]) == [("one two", (1, 2), None, {})]
        assert self.read({"prompt": ["1", "2"]}) == [("1", (1,), None, {}), ("2", (2,), None, {})]

    @pytest.mark.parametrize("batch", [[], 3, {"text": ["1"]}, {"input_ids": [[1]], "answer": ["a", "b"]}])
    def test_what_is_no_batch_is_refused(self, batch: object) -> None:
        with pytest.raises(DataError, match="batch 7"):
            self.read(batch)

    def test_texts_need_a_tokenizer(self) -> None:
        with pytest.raises(DataError, match="tokenizer is None"):
            BatchReader(None, Words(), needs_mask=False).read(["12"], 0, "batch 7")
