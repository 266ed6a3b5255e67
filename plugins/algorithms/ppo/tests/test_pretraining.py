"""Pretraining text beside the policy's loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.batching import collate, masked
from rlhf_core.errors import DataError
from rlhf_core.types import BufferItem
from rlhf_ppo.pretraining import PretrainingFile, PretrainingLoader, pretraining_count, pretraining_loss


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


def test_the_loss_is_of_every_token_but_the_first_and_of_no_padding(
    make_items: Callable[..., list[BufferItem]],
) -> None:
    items = make_items(1)
    loader = PretrainingLoader(iter([batch_of([4, 5, 6], [7, 8])]))
    batch = loader.attach(collate(items), items)
    assert pretraining_count(batch) == 3
    assert float(pretraining_loss(Uniform(), batch)) == pytest.approx(3 * math.log(16), rel=1e-6)


def test_labels_say_what_is_learnt(make_items: Callable[..., list[BufferItem]]) -> None:
    items = make_items(1)
    loader = PretrainingLoader(iter([batch_of([4, 5, 6], labels=[[-100, -100, 6]])]))
    assert pretraining_count(loader.attach(collate(items), items)) == 1


def test_a_stand_in_takes_no_text_and_counts_none(make_items: Callable[..., list[BufferItem]]) -> None:
    items = make_items(1)
    loader = PretrainingLoader(iter([batch_of([4, 5]), batch_of([6, 7])]))
    loader.attach(collate(items), items)
    nothing = [masked(items[0])]
    assert pretraining_count(loader.attach(collate(nothing), nothing)) == 0
    assert loader.attach(collate(items), items).ptx_ids.tolist() == [[6, 7]]


def test_a_file_gives_each_sample_its_text(
    make_items: Callable[..., list[BufferItem]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "12"}\n{"text": "345"}\n')
    items = make_items(3)
    texts = PretrainingFile(str(path), tokenizer, max_tokens=3)
    together = texts.attach(collate(items), items)
    assert together.ptx_ids.tolist() == [[5, 6, 2], [7, 8, 9], [5, 6, 2]]
    assert pretraining_count(together) == sum(pretraining_count(texts.attach(collate([i]), [i])) for i in items) == 6
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="text.jsonl:1"):
        PretrainingFile(str(path), tokenizer, max_tokens=3)
