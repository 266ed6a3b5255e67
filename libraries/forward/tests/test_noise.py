"""Counter-based noise and the sampler that uses it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import DivergenceError
from rlhf_forward import greedy_sample, inverse_cdf_sample, token_log_probs, uniforms
from rlhf_forward.noise import philox4x32

WORD = 0xFFFFFFFF


# Random123 (Salmon 2011), file tests/kat_vectors, lines `philox4x32 10`.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), key)) == expected


def philox_loop(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & WORD,
            (first >> 32) ^ counter[3] ^ key[1],
            first & WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_uniforms_equal_a_loop(seed: int, sample_id: int, token: int) -> None:
    words = philox_loop([sample_id & WORD, sample_id >> 32, token & WORD, token >> 32], [seed & WORD, seed >> 32])
    expected = (((words[0] >> 6) << 26 | words[1] >> 6) + 0.5) / 2**52
    got = uniforms(seed, torch.tensor([sample_id]), torch.tensor([token]))
    assert got.dtype == torch.float64 and float(got) == expected and 0.0 < float(got) < 1.0


def test_the_extreme_words_stay_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_forward import noise

    one = torch.tensor([1])
    for word, bound in ((0, 2.0**-53), (WORD, 1.0 - 2.0**-53)):
        monkeypatch.setattr(noise, "philox4x32", lambda counter, key, word=word: (torch.tensor([word]),) * 4)
        assert float(uniforms(0, one, one)) == bound


def test_noise_depends_on_seed_sample_and_token_alone() -> None:
    ids, steps = torch.arange(6), torch.arange(9)
    block = uniforms(3, ids[:, None], steps)
    assert block.shape == (6, 9) and block.unique().numel() == block.numel()
    assert torch.equal(block[4, 2:3], uniforms(3, ids[4:5], steps[2:3]))
    assert not torch.isin(block, uniforms(4, ids[:, None], steps)).any()


def test_noise_is_uniform() -> None:
    draws = uniforms(0, torch.arange(200)[:, None], torch.arange(500)).flatten()
    counts = torch.histc(draws, 20, 0.0, 1.0)
    expected = draws.numel() / 20
    assert float(((counts - expected).square() / expected).sum()) < 43.8  # chi-squared, 19 degrees, p = 0.001


def sample_loop(
    logits: list[float], u: float, temperature: float, top_k: int, top_p: float
) -> tuple[int, float, list[int]]:
    top = max(logits)
    weights = {i: math.exp((x - top) / temperature) for i, x in enumerate(logits)}
    if 0 < top_k < len(weights):
        smallest = sorted(weights.values())[-top_k]
        weights = {i: w for i, w in weights.items() if w >= smallest}
    if top_p < 1.0:
        target, reached = top_p * sum(weights.values()), 0.0
        for smallest in sorted(weights.values(), reverse=True):
            reached += smallest
            if reached >= target:
                break
        weights = {i: w for i, w in weights.items() if w >= smallest}
    total, passed = sum(weights.values()), 0.0
    for token, weight in weights.items():
        passed += weight
        if passed > u * total:
            return token, math.log(weight / total), list(weights)
    raise AssertionError("u is below 1")


@given(
    st.lists(st.integers(-60, 60).map(lambda tenths: tenths / 10), min_size=2, max_size=300),
    st.integers(0, 10**6),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 1000]),
    st.sampled_from([0.3, 0.83, 1.0]),
)
def test_draws_equal_a_loop(logits: list[float], sample: int, temperature: float, top_k: int, top_p: float) -> None:
    u = uniforms(1, torch.tensor([sample]), torch.tensor([0]))
    got = inverse_cdf_sample(torch.tensor([logits]), u, temperature, top_k, top_p)
    token, log_prob, kept = sample_loop(logits, float(u), temperature, top_k, top_p)
    # A uniform number or a nucleus border may lie closer to an edge than float32 can tell.
    nudged = [
        sample_loop(logits, float(u) + e, temperature, top_k, p)
        for e in (-1e-5, 1e-5)
        for p in (top_p - 1e-6, top_p + 1e-6)
    ]
    if all((t, k) == (token, kept) for t, _, k in nudged):
        assert int(got.token_ids) == token
        assert float(got.log_probs) == pytest.approx(log_prob, rel=1e-5, abs=1e-5)
        if top_p < 1.0 or 0 < top_k < len(logits):
            assert got.support_ids is not None and got.support_ids[0].tolist() == kept
        else:
            assert got.support_ids is None


OPTIONS = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 20, 1.0), (1.0, 0, 0.9), (1.3, 40, 0.6)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), OPTIONS)
def test_log_probs_are_those_a_trainer_computes(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(16, 1000, generator=torch.Generator().manual_seed(0))
    got = inverse_cdf_sample(logits, uniforms(0, torch.arange(16), torch.tensor(0)), temperature, top_k, top_p)
    again = token_log_probs(logits, got.token_ids, temperature, got.support_ids)
    assert got.log_probs.dtype == torch.float32
    torch.testing.assert_close(got.log_probs, again, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), OPTIONS)
@pytest.mark.parametrize("vocabulary", [16, 1000, 5000])
def test_a_row_gives_the_same_token_in_any_batch(temperature: float, top_k: int, top_p: float, vocabulary: int) -> None:
    logits = torch.randn(24, vocabulary, generator=torch.Generator().manual_seed(2)).round(decimals=1)  # with ties
    logits[3] = 0.0
    noise = uniforms(7, torch.arange(24), torch.tensor(5))
    batched = inverse_cdf_sample(logits, noise, temperature, top_k, top_p)
    for rows in ([3], [0], [23, 3], list(range(5, 12))):
        alone = inverse_cdf_sample(logits[rows], noise[rows], temperature, top_k, top_p)
        assert torch.equal(alone.token_ids, batched.token_ids[rows])
        assert torch.equal(alone.log_probs, batched.log_probs[rows])
        if alone.support_ids is not None:
            assert batched.support_ids is not None
            width = alone.support_ids.shape[1]
            assert torch.equal(alone.support_ids, batched.support_ids[rows, :width])
            assert (batched.support_ids[rows, width:] == -1).all()


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1.0 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    logits = torch.full((1, 400), -math.inf)
    logits[0, [7, 390]] = torch.tensor([0.0, -80.0])
    got = inverse_cdf_sample(logits, torch.tensor([u], dtype=torch.float64))
    assert int(got.token_ids) == 7
    assert torch.isfinite(got.log_probs).all()


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05])
    noise = uniforms(0, torch.arange(20_000), torch.tensor(0))
    tokens = inverse_cdf_sample(probabilities.log().expand(20_000, 4), noise).token_ids
    counts, expected = torch.bincount(tokens, minlength=4), 20_000 * probabilities
    assert float(((counts - expected).square() / expected).sum()) < 16.3  # chi-squared, 3 degrees, p = 0.001


def test_truncation_keeps_the_likeliest_and_pads_the_rest() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.05, 0.05], [0.25, 0.25, 0.25, 0.25]]).log()
    half = torch.full((2,), 0.5, dtype=torch.float64)
    nucleus = inverse_cdf_sample(logits, half, top_p=0.7)
    assert nucleus.support_ids is not None
    assert nucleus.support_ids.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]  # ties stay together
    torch.testing.assert_close(nucleus.log_probs[0], torch.tensor(2 / 3).log())
    likeliest = inverse_cdf_sample(logits[:1], half[:1], top_k=1)
    assert int(likeliest.token_ids) == 0 and float(likeliest.log_probs) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_distribution_are_named(bad: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 5] = bad
    with pytest.raises(DivergenceError, match="sampling: the policy's logits are not finite"):
        inverse_cdf_sample(logits, torch.full((2,), 0.5, dtype=torch.float64))


def test_greedy_takes_the_likeliest() -> None:
    got = greedy_sample(torch.tensor([[0.1, 0.7, 0.2]]).log())
    assert int(got.token_ids) == 1 and got.support_ids is None
    torch.testing.assert_close(got.log_probs, torch.tensor([0.7]).log())


def test_a_uniform_number_on_a_border_belongs_to_the_next_token() -> None:
    halves = inverse_cdf_sample(torch.zeros(1, 2), torch.tensor([0.5], dtype=torch.float64))
    assert int(halves.token_ids) == 1


def test_rows_of_narrow_and_of_wide_nuclei_in_one_batch_each_keep_their_own() -> None:
    scales = torch.tensor([8.0, 0.0, 2.0, 0.1, 30.0])
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)) * scales[:, None]
    got = inverse_cdf_sample(logits, torch.full((5,), 0.5, dtype=torch.float64), top_p=0.9)
    assert got.support_ids is not None
    for row, support in zip(logits, got.support_ids, strict=True):
        weights = row.softmax(-1)
        ordered = weights.sort(descending=True).values
        number = int((ordered.cumsum(0, dtype=torch.float64) < 0.9 * weights.sum(dtype=torch.float64)).sum()) + 1
        expected = (weights >= ordered[number - 1]).nonzero().squeeze(-1).tolist()
        assert [kept for kept in support.tolist() if kept >= 0] == expected
