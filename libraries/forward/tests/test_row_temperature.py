"""Log-probs are of the temperature in the column `temperature`, in every way a forward pass is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rlhf_core import Column, Columns
from rlhf_core.batching import collate, split
from rlhf_core.columns import ENGINE_COLUMNS
from rlhf_core.types import BufferItem
from rlhf_forward.forward import policy_forward
from rlhf_passes import lean_head, lean_logits
from rlhf_passes.packing import packed_attention
from rlhf_testing.models import tiny_model
from rlhf_testing.samples import make_item

RUN = 0.8
OWN: list[list[float] | None] = [[0.5] * 4, None, [1.0, 1.0], [2.0, 0.0, 1.5]]
"""Temperatures of each row's tokens; 0 and None are the run's."""
WAYS = ["plain", "packed", "chunked", "packed-chunked", "lean-logits", "support"]


def items() -> list[BufferItem]:
    lengths = [4, 3, 2, 3]
    made = [make_item(i, num_prompt_tokens=2 + i, num_actions=length) for i, length in enumerate(lengths)]
    return [
        each if own is None else replace(each, columns=Columns({"temperature": own}, ENGINE_COLUMNS))
        for each, own in zip(made, OWN, strict=True)
    ]


def supported(item: BufferItem) -> BufferItem:
    """Its tokens sampled from four."""
    others = torch.tensor([1, 2, 3])
    kept = torch.cat([item.response_ids[:, None], others.expand(item.num_response_tokens, 3)], dim=1)
    return replace(item, support_ids=kept.int())


@contextmanager
def way(name: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lean_head, "MIN_LOGITS", 0 if "chunked" in name else 1 << 40)
    monkeypatch.setattr(lean_head, "CHUNK_LOGITS", 3 * model.config.vocab_size)  # three tokens at a time
    monkeypatch.setattr(lean_logits, "MIN_LOGITS", 0 if name == "lean-logits" else 1 << 40)
    monkeypatch.setattr(lean_logits, "CHUNK_LOGITS", 3 * model.config.vocab_size)
    with packed_attention(model) if "packed" in name else nullcontext():
        yield


def reference(model: nn.Module, item: BufferItem) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [A] by hand, in float64."""
    own = item.columns.get("temperature", torch.zeros(item.num_response_tokens)).double()
    temperatures = torch.where(own > 0, own, RUN)
    tokens = torch.cat([item.prompt_ids, item.response_ids])
    logits = model(tokens[None]).logits[0, item.prompt_ids.numel() - 1 : -1] / temperatures[:, None]
    if item.support_ids is not None:
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, item.support_ids.long(), True)
        logits = logits.masked_fill(~kept, -torch.inf)
    log_all = logits.log_softmax(-1)
    entropies = -(log_all.exp() * log_all.clamp(min=-1e30)).sum(-1)
    return log_all.gather(1, item.response_ids[:, None])[:, 0], entropies


@pytest.mark.parametrize("name", WAYS)
def test_values_and_gradients_are_those_of_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [supported(each) for each in items()] if name == "support" else items()
    model, exact = tiny_model(), tiny_model().double()
    batch = collate(given)
    with way(name, model, monkeypatch):
        found = policy_forward(model, batch, RUN, with_entropy=True)
        assert found.entropy is not None
        (found.log_probs.sum() + 0.3 * found.entropy.sum()).backward()
    expected = [reference(exact, each) for each in given]
    (sum(log_probs.sum() + 0.3 * entropies.sum() for log_probs, entropies in expected)).backward()
    for row, (log_probs, entropies) in enumerate(expected):
        torch.testing.assert_close(found.log_probs[row, : len(log_probs)].double(), log_probs, rtol=0, atol=2e-6)
        torch.testing.assert_close(found.entropy[row, : len(entropies)].double(), entropies, rtol=0, atol=2e-6)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_column_of_zeros_is_the_temperature_of_the_run(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [replace(each, columns=Columns()) for each in items()]
    zeros = [
        replace(each, columns=Columns({"temperature": torch.zeros(each.num_response_tokens)}, ENGINE_COLUMNS))
        for each in plain
    ]
    model = tiny_model()
    with way(name, model, monkeypatch):
        absent = policy_forward(model, collate(plain), temperature, with_entropy=True)
        present = policy_forward(model, collate(zeros), temperature, with_entropy=True)
    assert torch.equal(absent.log_probs, present.log_probs) and torch.equal(absent.entropy, present.entropy)


def test_what_is_read_from_the_logits_is_at_the_same_temperature() -> None:
    model, given = tiny_model(), items()
    batch = collate(given)
    output = policy_forward(model, batch, RUN, read=lambda logits: logits.log_softmax(-1))
    labels = batch.sequences[:, batch.prompt_length :]
    assert output.read is not None
    taken = output.read.gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(torch.where(batch.action_mask, taken, 0.0), output.log_probs)


def test_a_batch_fills_an_optional_column() -> None:
    batch = collate(items())
    assert batch.columns["temperature"].tolist() == [[0.5] * 4, [0.0] * 4, [1.0, 1.0, 0, 0], [2.0, 0, 1.5, 0]]
    assert split(batch)[1].columns["temperature"].tolist() == [0.0] * 3
    kinds = {"level": Column(per="sample", dtype="int32", fill=-1, optional=True), "score": Column()}
    first, second = make_item(0), make_item(1)
    with_level = replace(first, columns=Columns({"level": [3, 4]}, kinds))
    assert collate([second, with_level]).columns["level"].tolist() == [[-1, -1], [3, 4]]
    with pytest.raises(ValueError, match=r"column 'score' is set for some samples of a batch and missing for \[1\]"):
        collate([replace(first, columns=Columns({"score": [1.0] * 4}, kinds)), second])
