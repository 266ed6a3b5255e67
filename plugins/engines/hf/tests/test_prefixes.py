"""What earlier turns of an episode left in the cache: used again, under the same weights, for the same samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import ConfigError
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_hf.prefixes import PrefixStore
from rlhf_hf.rows import make_rows

SAMPLING = SamplingParams(max_new_tokens=12)


def play(made, first, collect, *, turns=3, observation=(7, 9, 8), goes_on=True, weights=None):
    """Turn by turn, each a call of its own; by sample the tokens and log-probs of each turn."""
    asked = [GenerationRequest(sample_id=r.sample_id, prompt_ids=r.prompt_ids, goes_on=goes_on) for r in first]
    told = {request.sample_id: [] for request in asked}
    for turn in range(turns):
        found = collect(made, asked, SAMPLING)
        for request in asked:
            told[request.sample_id].append(found[request.sample_id])
        asked = [
            GenerationRequest(
                sample_id=request.sample_id,
                # Observations of different lengths.
                prompt_ids=(*request.prompt_ids, *found[request.sample_id].token_ids, *observation[: 1 + index % 3]),
                offset=request.offset + len(found[request.sample_id].token_ids),
                goes_on=goes_on,
            )
            for index, request in enumerate(asked)
        ]
        if weights is not None and turn == 0:
            made._module.load_state_dict(weights)
            made.weights_updated(1)
    return told


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "neox", "llama-eager"])
def test_the_next_turn_is_the_same_and_computes_what_is_new(family, model, engine, requests, collect):
    first = requests(7, same=2)
    plain = play(engine(model(family), prefix_cache_tokens=0, max_batch_size=4), first, collect)
    made = engine(model(family), max_batch_size=4)
    found = play(made, first, collect)
    for sample, turns in plain.items():
        for turn, expected in enumerate(turns):
            got = found[sample][turn]
            assert got.token_ids == expected.token_ids
            assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    prompts = {request.sample_id: len(request.prompt_ids) for request in first}
    for sample, turns in found.items():
        assert turns[0].num_reused in (0, prompts[sample])  # of the other answer to this prompt
        assert turns[1].num_reused == prompts[sample] + len(turns[0].token_ids) - 1
    assert all(turn.num_reused == 0 for turns in list(plain.values())[::2] for turn in turns)


def test_new_weights_drop_it(model, engine, requests, collect):
    first, module = requests(4), model("llama")
    generator = torch.Generator().manual_seed(1)
    weights = {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in module.state_dict().items()}
    found = play(engine(module), first, collect, weights=weights)
    plain = play(engine(model("llama"), prefix_cache_tokens=0), first, collect, weights=weights)
    assert {k: [t.token_ids for t in v] for k, v in found.items()} == {
        k: [t.token_ids for t in v] for k, v in plain.items()
    }
    assert all(turns[1].num_reused == 0 and turns[2].num_reused > 0 for turns in found.values())


def test_answers_that_nothing_follows_are_not_kept(model, engine, requests, collect):
    made = engine(model("llama"))
    play(made, requests(4), collect, turns=1, goes_on=False)
    assert made._prefixes.num_tokens == 0
    play(made, requests(4), collect, turns=1)
    assert made._prefixes.num_tokens > 0
    made.close()
    assert made._prefixes.num_tokens == 0


def test_memory_is_bounded_and_the_oldest_goes_first(model, engine, requests, collect):
    made = engine(model("llama"), prefix_cache_tokens=40)
    play(made, requests(8), collect, turns=2)
    assert 0 < made._prefixes.num_tokens <= 40

    store = PrefixStore(10)
    for first in (1, 2, 3):
        store.put((first, 5, 6, 7), ())
    assert store.num_tokens == 8
    assert store.longest((1, 5, 6, 7, 8)) is None
    assert store.longest((2, 5, 6, 7, 8)) is not None
    store.put((4, 5, 6, 7), ())  # 3 was used longest ago
    assert store.longest((3, 5, 6, 7, 8)) is None and store.longest((2, 5, 6, 7, 8)) is not None
    assert not store.lacks(tuple(range(11))) and store.lacks(tuple(range(10)))
    store.put(tuple(range(11)), ())
    assert store.num_tokens == 8


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), max_size=30), st.integers(1, 20))
def test_what_is_stored_is_counted_and_found(sequences, max_tokens):
    store, kept = PrefixStore(max_tokens), list[tuple[int, ...]]()
    for sequence in sequences:
        found = store.longest(sequence)
        prefixes = [each for each in kept if len(each) < len(sequence) and sequence[: len(each)] == each]
        assert (found.num_tokens if found else 0) == max(map(len, prefixes), default=0)
        if found:
            kept.append(kept.pop(kept.index(sequence[: found.num_tokens])))
        if sequence not in kept and len(sequence) <= max_tokens:
            kept.append(sequence)
        store.put(sequence, ())
        while sum(map(len, kept)) > max_tokens:
            kept.pop(0)
        assert store.num_tokens == sum(map(len, kept))


def test_the_longest_that_leaves_a_token_is_used():
    store = PrefixStore(100)
    for length in (2, 3, 4):
        store.put(tuple(range(length)), ())
    found = store.longest((0, 1, 2, 3))
    assert found is not None and found.num_tokens == 3
    assert store.longest((5, 1, 2, 3)) is None
    store.put((0, 1), ())
    assert store.num_tokens == 9


@pytest.mark.parametrize("canceled", [False, True])
def test_what_weights_in_flight_left_half_done_is_not_kept(canceled, model, engine, requests):
    made, calls = engine(model("llama")), 0

    def between():
        nonlocal calls
        calls += 1
        if calls == 4:
            made.weights_updated(1)
            if canceled:
                made.cancel(requests(3)[0].sample_id)
        asked = requests(3) if calls == 1 else ()
        return [
            (GenerationRequest(sample_id=r.sample_id, prompt_ids=r.prompt_ids, goes_on=True), SAMPLING) for r in asked
        ]

    found = list(made.generate_in_flight(between))
    assert any(each.policy_versions for each in found) and len(found) == (2 if canceled else 3)
    assert made._prefixes.num_tokens == 0


def test_sixteen_answers_to_a_prompt_prefill_it_once(model, engine, collect):
    made = engine(model("llama"), max_batch_size=16)
    prompt = tuple(4 + i % 30 for i in range(100))
    asked = [GenerationRequest(sample_id=i, prompt_ids=prompt) for i in range(16)]
    found = collect(made, asked, SAMPLING)
    assert sorted(each.num_reused for each in found.values()) == [0] + [100] * 15


def test_a_bound_is_a_number_of_tokens(model, engine):
    with pytest.raises((ConfigError, ValueError)):
        engine(model("llama"), prefix_cache_tokens=-1)


def test_a_row_that_new_weights_interrupted_leaves_no_prefix():
    """Canceled before it sampled a token with them, its keys and values are all of the old ones."""
    (row,) = make_rows([GenerationRequest(sample_id=1, prompt_ids=(4, 5), goes_on=True)], SamplingParams(), None)
    row.token_ids, row.versions, row.version = [6, 7], [3, 3], 3
    assert row.prefix == (4, 5, 6)
    row.version = 4
    assert row.prefix is None
