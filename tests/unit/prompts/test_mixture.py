"""Sources mixed by weights: shares, repetition, and every position a function of seed and position."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.components import PromptsContext
from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.models.builtin import build_character_tokenizer
from rlhf_core.plugins.discovery import load, resolve_build
from rlhf_core.prompts.mixture import Mixture
from rlhf_core.prompts.order import Part, order_of
from rlhf_core.prompts.stream import PromptStream, RecordStream


def source(name, count):
    return [{"prompt": f"{name}{index}"} for index in range(count)]


def test_shares_hold_and_a_small_source_repeats():
    mixture = Mixture([("a", 3.0, source("a", 500)), ("b", 1.0, source("b", 10))])
    drawn = RecordStream(mixture, seed=0).records(range(2000))
    assert [sum(record["source"] == name for record in drawn) for name in "ab"] == [1500, 500]
    b = [record["prompt"] for record in drawn if record["source"] == "b"]
    for start in range(0, 500, 10):
        assert len(set(b[start : start + 10])) == 10, "each epoch of a source has every record once"
    assert b[:10] != b[10:20]
    assert 600 < sum(record["source"] == "a" for record in drawn[:1000]) < 900, "they take turns"


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
    seed=st.integers(0, 5),
    positions=st.lists(st.integers(0, 5000), min_size=1, max_size=10),
)
def test_a_position_does_not_depend_on_what_was_asked_before(sizes, weights, seed, positions):
    parts = [Part(str(i), size, weights[i]) for i, size in enumerate(sizes)]
    used, training = order_of(range(sum(sizes)), parts, seed), range(sum(sizes))
    for position in positions:
        found = used.index(position)
        assert found in training and found == order_of(training, parts, seed).index(position)


def test_a_source_alone_is_shuffled_as_without_a_mixture():
    alone, mixed = RecordStream(source("a", 20), seed=3), RecordStream(Mixture([("a", 1.0, source("a", 20))]), seed=3)
    assert [alone.index(p) for p in range(50)] == [mixed.index(p) for p in range(50)]


def test_a_run_file_names_sources_and_their_options(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "12"}) + "\n")
    entries = [{"name": "jsonl", "path": "p.jsonl", "weight": 1}, {"name": "sort-digits", "size": 9, "label": "digits"}]
    mixture = build(tmp_path, entries)
    assert [record["source"] for record in (mixture[0], mixture[1])] == ["jsonl", "digits"]
    assert mixture.describe(0) == f"{tmp_path / 'p.jsonl'}:1"
    assert len(mixture) == 10
    with pytest.raises(IndexError):
        mixture[10]


def test_options_stand_beside_the_name_in_a_run_file(tmp_path):
    sources = [{"name": "sort-digits", "size": 9, "label": "digits"}, {"name": "jsonl", "path": "p.jsonl"}]
    run = {"model": {"path": "builtin:tiny-digits"}, "prompts": {"name": "mixture", "sources": sources}}
    resolved = resolve(run)
    assert [entry.options for entry in resolved.prompts.config.sources] == [{"size": 9}, {"path": "p.jsonl"}]
    assert resolve(resolved.to_mapping()).to_mapping() == resolved.to_mapping()


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ConfigError, match="two sources"):
        build(tmp_path, [{"name": "sort-digits"}, {"name": "sort-digits"}])
    with pytest.raises(ConfigError, match="sizes") as caught:
        build(tmp_path, [{"name": "sort-digits"}, {"name": "sort-digits", "label": "b", "sizes": 3}])
    assert caught.value.where == "prompts.sources.1"
    (tmp_path / "p.jsonl").write_text('{"prompt": "1"}\n{"prompt": 3}\n')
    mixture = build(tmp_path, [{"name": "sort-digits", "size": 3}, {"name": "jsonl", "path": "p.jsonl"}])
    with pytest.raises(DataError) as caught:
        PromptStream(mixture, build_character_tokenizer("0123456789>"), seed=0)
    assert caught.value.where == f"{tmp_path / 'p.jsonl'}:2"


def build(folder, entries):
    selected = load("prompts", "mixture")
    config = selected.component.config.model_validate({"sources": entries})
    return resolve_build(selected)(config, PromptsContext(seed=0, base_folder=folder))
