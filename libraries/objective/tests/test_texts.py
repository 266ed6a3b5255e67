"""Texts of a file alongside the policy's loss."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.batching import collate, masked
from rlhf_core.errors import DataError
from rlhf_objective import TextFile, TextLoader, text_count, text_loss
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.samples import make_item

TOKENIZER = tiny_tokenizer("0123456789>,")


class Uniform(nn.Module):
    """Gives every token the same probability."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 16))


def batch_of(*rows: list[int], labels: list[list[int]] | None = None) -> dict[str, Tensor]:
    width = max(map(len, rows))
    made = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }
    return made if labels is None else {**made, "labels": torch.tensor(labels)}


def test_the_loss_is_of_every_token_but_the_first_and_of_no_padding() -> None:
    items = [make_item(number) for number in range(1)]
    loader = TextLoader(iter([batch_of([4, 5, 6], [7, 8])]))
    batch = loader.attach(collate(items), items)
    assert text_count(batch) == 3
    assert float(text_loss(Uniform(), batch)) == pytest.approx(3 * math.log(16), rel=1e-6)


def test_labels_say_what_is_learnt() -> None:
    items = [make_item(number) for number in range(1)]
    loader = TextLoader(iter([batch_of([4, 5, 6], labels=[[-100, -100, 6]])]))
    assert text_count(loader.attach(collate(items), items)) == 1


def test_a_stand_in_takes_no_text_and_counts_none() -> None:
    items = [make_item(number) for number in range(1)]
    loader = TextLoader(iter([batch_of([4, 5]), batch_of([6, 7])]))
    loader.attach(collate(items), items)
    nothing = [masked(items[0])]
    assert text_count(loader.attach(collate(nothing), nothing)) == 0
    assert loader.attach(collate(items), items).text_ids.tolist() == [[6, 7]]


def test_a_file_gives_each_sample_its_text(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "12"}\n{"text": "345"}\n')
    items = [make_item(number) for number in range(3)]
    texts = TextFile(str(path), TOKENIZER, max_tokens=3, option="algorithm.texts")
    together = texts.attach(collate(items), items)
    assert together.text_ids.tolist() == [[5, 6, 2], [7, 8, 9], [5, 6, 2]]
    assert text_count(together) == sum(text_count(texts.attach(collate([i]), [i])) for i in items) == 6
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="text.jsonl:1"):
        TextFile(str(path), TOKENIZER, max_tokens=3, option="algorithm.texts")
    path.write_text('{"text": "1"}\n')
    without_end = tiny_tokenizer("0123456789>,")
    without_end.eos_token = None
    with pytest.raises(DataError, match=r"text.jsonl:1.*leaves none to predict"):
        TextFile(str(path), without_end, max_tokens=3, option="algorithm.texts")


def test_a_completion_is_predicted_and_its_prompt_is_not(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"prompt": "12>", "completion": "12"}\n{"text": "345"}\n')
    items = [make_item(number) for number in range(2)]
    batch = TextFile(str(path), TOKENIZER, 8, option="algorithm.texts").attach(collate(items), items)
    prompt, eos = list(TOKENIZER("12>")["input_ids"]), TOKENIZER.eos_token_id
    assert batch.text_ids[0].tolist() == [*prompt, *TOKENIZER("12", add_special_tokens=False)["input_ids"], eos]
    assert batch.text_mask[0].tolist() == [False] * len(prompt) + [True] * 3
    assert float(text_loss(Uniform(), batch)) == pytest.approx(text_count(batch) * math.log(16), rel=1e-6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
        ('{"prompt": "1>"}', "neither a `text` nor"),
        ('{"prompt": "123456>", "completion": "1"}', "leaves none of 4 for the completion"),
    ],
)
def test_wrong_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"text": "1"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"records\.jsonl:2.*{message}"):
        TextFile(str(path), TOKENIZER, 4, option="algorithm.texts")
    with pytest.raises(DataError, match=r"(?s)cannot be read.*check algorithm\.texts"):
        TextFile(str(tmp_path / "none.jsonl"), TOKENIZER, 4, option="algorithm.texts")
