"""Spans of two tokenizers against loops, and the gradient of a policy taught over spans."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_distill.spans import (
    UNALIGNED,
    add_closing_credit,
    align,
    align_answer,
    sum_over_spans,
    text_of_tokens,
)
from rlhf_testing.models import tiny_tokenizer


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_spans_are_the_shortest_common_texts(ours: list[int], theirs: list[int]) -> None:
    """Sizes of both tokenizers' tokens. The longer text is cut to the shorter one by one last token."""
    length = max(sum(ours), sum(theirs))
    sides = [[*sizes, length - sum(sizes)] if sum(sizes) < length else sizes for sizes in (ours, theirs)]
    ends = [list(itertools.accumulate(sizes)) for sizes in sides]
    spans, ranges = align(*ends)
    common = sorted(set(ends[0]) & set(ends[1]))
    assert len(ranges) == len(common) and spans == sorted(spans)
    for span, (end, (first, last)) in enumerate(zip(common, ranges, strict=True)):
        start = common[span - 1] if span else 0
        assert [i for i, each in enumerate(ends[0]) if start < each <= end] == [
            i for i, each in enumerate(spans) if each == span
        ]
        assert [i for i, each in enumerate(ends[1]) if start < each <= end] == list(range(first, last))


@given(st.text(st.characters(codec="utf-8"), max_size=12), st.randoms(use_true_random=False))
def test_tokens_of_bytes_end_between_characters(text: str, draw: Any) -> None:
    data, pieces = text.encode(), []
    while data:
        size = draw.randint(1, 5)
        pieces.append(data[:size])
        data = data[size:]

    def decode(ids: Any) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    found, ends = text_of_tokens(decode, range(len(pieces)))
    assert found == text
    known = list(itertools.accumulate(map(len, pieces)))
    for total, end in zip(known, ends, strict=True):
        if end is not None:
            assert text[:end].encode() == text.encode()[:total]


def test_partial_characters_of_both_tokenizers_are_one_span() -> None:
    assert align([1, None, 2], [None, 1, 2]) == ([0, 1, 1], [(0, 2), (2, 3)])
    assert align([1, 1, 2], [1, 2]) == ([0, 0, 1], [(0, 1), (1, 2)]), "a token without text"
    assert align([], []) == ([], [])


def test_an_answer_ends_with_both_eos(pairs: Any) -> None:
    policy = tiny_tokenizer()
    ids = [*policy.encode("12312"), policy.bos_token_id, policy.eos_token_id]
    theirs, spans, ranges = align_answer(policy, pairs, ids)
    assert pairs.convert_ids_to_tokens(theirs) == ["12", "3", "12", "<eos>"]
    assert spans == [0, 0, 1, 2, 2, UNALIGNED, 3] and ranges == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert align_answer(policy, pairs, ids[:3])[1] == [0, 0, 1], "a cut answer has no EOS"
    assert align_answer(policy, pairs, ids[-1:]) == ([pairs.eos_token_id], [0], [(0, 1)])


def test_bytes_without_a_character_are_not_taught() -> None:
    """The policy's tokens are bytes. The teacher's are characters."""

    class Bytes:
        all_special_ids = (256,)

        def decode(self, ids: Any, **options: Any) -> str:
            return bytes(ids).decode(errors="replace")

    def characters(text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": list(map(ord, text)), "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    ids = [*"aé".encode(), *"é".encode()[:1]]
    theirs, spans, _ = align_answer(Bytes(), characters, ids)
    assert spans == [0, 1, 1, UNALIGNED] and theirs == [97, 233, 0xFFFD]


def test_markup_in_the_text_is_text(pairs: Any) -> None:
    class Spelling:
        all_special_ids = ()

        def decode(self, ids: Any, **options: Any) -> str:
            return "".join("1<eos>2"[each] for each in ids)

    theirs, _, _ = align_answer(Spelling(), pairs, range(7))
    assert pairs.eos_token_id not in theirs


def test_the_gradient_is_that_of_the_kl_over_texts() -> None:
    """All texts of two characters from {a, b}: the policy has a token per character, the teacher per text."""
    torch.manual_seed(0)
    logits = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)  # of the first, and after a and b
    teacher = torch.randn(4, dtype=torch.float64).log_softmax(-1)

    def log_probs(text: tuple[int, int]) -> torch.Tensor:
        table = logits.log_softmax(-1)
        return torch.stack([table[0, text[0]], table[1 + text[0], text[1]]])

    texts = list(itertools.product(range(2), repeat=2))
    kl = sum(log_probs(text).sum().exp() * (log_probs(text).sum() - teacher[i]) for i, text in enumerate(texts))
    (exact,) = torch.autograd.grad(kl, logits)  # type: ignore[arg-type]
    surrogate = torch.zeros((), dtype=torch.float64)
    spans, ranges = align([1, 2], [2])
    for index, text in enumerate(texts):
        each = log_probs(text)
        ours = sum_over_spans(each.detach()[None], torch.tensor([spans]))[0]
        gain = torch.stack([teacher[index] for span in spans if ranges[span] == (0, 1)]) - ours
        surrogate = surrogate - each.sum().exp().detach() * (gain * each).sum()
    (found,) = torch.autograd.grad(surrogate, logits)
    assert torch.allclose(found, exact, atol=1e-12)


def test_a_token_that_ends_a_span_shares_its_advantage(pairs: Any) -> None:
    """`3` is a token of the teacher only because the answer ends after it."""
    policy = tiny_tokenizer()
    _, spans, _ = align_answer(policy, pairs, [*policy.encode("123"), policy.eos_token_id])
    assert spans == [0, 0, 1, 2]
    gains = torch.tensor([[0.5, 0.5, -9.0, 0.25]])
    assert add_closing_credit(gains, torch.tensor([spans])).tolist() == [[0.5, 0.5, -8.5, -8.75]]


@pytest.mark.parametrize("seed", range(3))
def test_closing_credit_over_holes(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    spans = torch.randint(0, 4, (3, 7), generator=draw).sort(dim=1).values
    spans[torch.rand(3, 7, generator=draw) < 0.3] = -1
    gains = torch.where(spans >= 0, spans.float().pow(2) + torch.arange(3)[:, None], 0.0)
    found = add_closing_credit(gains, spans)
    for row, numbers in enumerate(spans.tolist()):
        for t, span in enumerate(numbers):
            has_before = span - 1 in numbers[:t] and span not in numbers[:t]
            expected = gains[row, t].item() + (float((span - 1) ** 2 + row) if span > 0 and has_before else 0.0)
            assert found[row, t].item() == expected


@pytest.mark.parametrize("seed", range(3))
def test_sums_over_spans(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(3, 7, generator=draw)
    spans = torch.randint(-1, 4, (3, 7), generator=draw)
    found = sum_over_spans(log_probs, spans)
    for row in range(3):
        for t in range(7):
            span = int(spans[row, t])
            own = [float(log_probs[row, i]) for i in range(7) if int(spans[row, i]) == span]
            assert found[row, t].item() == pytest.approx(math.fsum(own) if span >= 0 else 0.0, abs=1e-6)
