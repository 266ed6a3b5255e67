"""Sources mixed by weights: shares, repetition, and every position a function of seed and position."""

import json
import pickle
from itertools import accumulate

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.components import TaskContext
from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.plugins.selected import load
from rlhf_core.prompts import PromptEncoder, RecordRules
from rlhf_data.curriculum import make_curriculum
from rlhf_data.curriculum_section import CurriculumConfig
from rlhf_data.mixture import Mixture, StreamedMixture
from rlhf_data.order import MixtureOrder
from rlhf_testing.contracts import PromptsContract
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_tokenizer


class TestMixture(PromptsContract):
    plugin = "mixture"

    @classmethod
    def make_options(cls, folder):
        (folder / "lines.jsonl").write_text('{"prompt": "2 + 2 = "}\n{"prompt": "3 + 3 = ", "source": "by hand"}\n')
        lines = {"name": "jsonl", "path": "lines.jsonl"}
        return {"sources": [lines, {"name": "sort-digits", "size": 9, "weight": 3}]}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("0123456789=abc")


def source(name, count):
    return [{"prompt": f"{name}{index}"} for index in range(count)]


def records_of(mixture, seed=0):
    rules = RecordRules(PromptEncoder(tiny_tokenizer("0123456789=abc>")))
    return mixture.make_stream(rules, seed=seed, held_out=0)


def test_shares_hold_and_a_small_source_repeats():
    mixture = Mixture([("a", 3.0, source("a", 500)), ("b", 1.0, source("b", 10))])
    stream = records_of(mixture)
    drawn = [stream.at(position)[0] for position in range(2000)]
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
    ends = list(accumulate(sizes))
    parts = [(weight, range(end - size, end)) for weight, size, end in zip(weights, sizes, ends, strict=False)]
    used = MixtureOrder(seed, parts)
    for position in positions:
        found = used.index(position)
        assert found in range(ends[-1]) and found == MixtureOrder(seed, parts).index(position)
    assert pickle.loads(pickle.dumps(used)).index(positions[0]) == used.index(positions[0])


def test_a_source_alone_is_shuffled_as_without_a_mixture(tokenizer):
    alone, mixed = (
        prompt_stream(source("a", 20), tokenizer, seed=3),
        records_of(Mixture([("a", 1.0, source("a", 20))]), seed=3),
    )
    assert [alone.order.index(place) for place in range(50)] == [mixed.order.index(place) for place in range(50)]


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


def test_the_file_of_a_source_is_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def lines(context, *, count: int = 2):\n    return [{'prompt': '1'}] * count\n")
    inner = {"name": "mixture", "sources": [{"name": "./mine.py:lines", "count": 1}], "label": "inner"}
    sources = [{"name": "mine.py:lines", "count": 3}, inner]
    run = {"model": {"path": "builtin:tiny-digits"}, "prompts": {"name": "mixture", "sources": sources}}
    monkeypatch.chdir(tmp_path)
    found = resolve(run).to_mapping()["prompts"]["sources"]
    file = f"{tmp_path / 'mine.py'}:lines"
    assert [found[0]["name"], found[1]["options"]["sources"][0]["name"]] == [file, file]
    assert [found[0]["options"], found[1]["options"]["sources"][0]["options"]] == [{"count": 3}, {"count": 1}]
    monkeypatch.chdir("/")
    mixture = build(tmp_path, found)
    assert [mixture[index]["source"] for index in range(len(mixture))] == ["lines"] * 4


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([{"name": "sort-digits"}, {"name": "sort-digits"}], 'prompts.sources: two sources are named "sort-digits"'),
        ([{"name": "sort-digits"}, {"name": "jsonl"}], "prompts.sources.1.path: is required"),
        ([{"name": "sort-digits", "sizes": 3}], 'prompts.sources.0.sizes: unknown key; did you mean "size"'),
        ([{"name": "sort-digits", "size": "many"}], "prompts.sources.0.size: should be a valid integer"),
        ([{"name": "sort-digit"}], "prompts.sources.0.name: "),
        ([{"name": "sort-digits", "too_long": "skip"}], "too_long applies to the whole mixture"),
        ([{"name": "./mine.py:lines"}], "prompts.sources.0.name: "),
    ],
)
def test_what_is_wrong_is_said_at_check(entries, says):
    run = {"model": {"path": "builtin:tiny-digits"}, "prompts": {"name": "mixture", "sources": entries}}
    with pytest.raises(ConfigError) as caught:
        resolve(run)
    assert says in caught.value.message
    prompts = {"prompts": {"name": "sort-digits"}, "eval": {"prompts": run["prompts"]}}
    with pytest.raises(ConfigError) as caught:
        resolve({**run, **prompts})
    assert says.replace("prompts.sources", "eval.prompts.sources") in caught.value.message


def test_a_wrong_record_is_named_by_its_file(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1"}\n{"prompt": 3}\n')
    mixture = build(tmp_path, [{"name": "sort-digits", "size": 3}, {"name": "jsonl", "path": "p.jsonl"}])
    with pytest.raises(DataError) as caught:
        prompt_stream(mixture, tiny_tokenizer("0123456789>"), seed=0)
    assert caught.value.where == f"{tmp_path / 'p.jsonl'}:2"


class Endless:
    """A stream that is read no further than it has to be."""

    def __init__(self, count=1 << 40):
        self.count, self.read = count, 0

    def __iter__(self):
        for index in range(self.count):
            self.read += 1
            yield {"prompt": f"{index}="}

    def describe(self, index):
        return f"endless, row {index + 1}"


class TestAStreamInAMixture:
    def stream(self, tokenizer, *, seed=0, endless=None, **options):
        sources = [("a", 3.0, endless or Endless()), ("b", 1.0, source("1", 10))]
        return prompt_stream(StreamedMixture(sources), tokenizer, seed=seed, **options)

    def test_shares_hold_and_each_source_has_its_own_order(self, tokenizer):
        stream = self.stream(tokenizer)
        drawn = [stream.record(position) for position in range(2000)]
        of = {name: [each["prompt"] for each in drawn if each["source"] == name] for name in "ab"}
        assert of["a"] == [f"{index}=" for index in range(1500)], "a stream keeps its order"
        assert len(of["b"]) == 500 and sorted(of["b"][:10]) == sorted(of["b"][10:20]) != of["b"][:10]
        assert stream.prompt(5).metadata["source"] in "ab"
        with pytest.raises(TypeError, match="the length of a streamed source is unknown"):
            len(stream)

    def test_a_resume_goes_on_at_its_place_in_each(self, tokenizer):
        first, again = self.stream(tokenizer), self.stream(tokenizer)
        expected = [first.record(position) for position in range(3000)]
        assert [again.record(position) for position in range(2500, 3000)] == expected[2500:]
        assert again.record(2400) == expected[2400], "one that is made again"
        assert first.digest == again.digest

    def test_it_is_read_as_it_is_drawn(self, tokenizer):
        endless = Endless()
        stream = self.stream(tokenizer, endless=endless)
        before = endless.read
        stream.prompt(40)
        assert endless.read - before <= 40

    def test_each_holds_out_its_share(self, tokenizer):
        stream = self.stream(tokenizer, held_out=8, endless=Endless(100))
        held_out = [json.dumps(record) for record in stream.evaluation_records()]
        assert [json.loads(record)["source"] for record in held_out] == ["a"] * 6 + ["b"] * 2
        assert not {json.dumps(stream.record(position)) for position in range(2000)} & set(held_out)

    def test_a_wrong_record_is_named(self, tokenizer):
        sources = [("a", 1.0, Endless(5)), ("b", 1.0, [{"prompt": "1"}, {"prompt": None}])]
        with pytest.raises(DataError) as caught:
            prompt_stream(StreamedMixture(sources), tokenizer, seed=0)
        assert caught.value.where == "record 2"

    def test_a_curriculum_says_why_it_cannot(self, tokenizer):
        with pytest.raises(ConfigError, match="known number of records"):
            make_curriculum(CurriculumConfig(), self.stream(tokenizer))

    def test_a_run_file_may_mix_them(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: Endless())
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the hub is not asked whether it answers
        entries = [
            {"name": "hf-dataset", "path": "o/n", "streaming": True, "label": "hub"},
            {"name": "sort-digits", "size": 9},
        ]
        mixture = build(tmp_path, entries)
        assert [weight for weight, _ in mixture.sources] == [1.0, 1.0]
        records = [next(iter(source)) for _, source in mixture.sources]
        assert [record["source"] for record in records] == ["hub", "sort-digits"]
        assert mixture.sources[0][1].describe(1) == "o/n, row 2"
        assert records_of(mixture).at(0)[0]["source"] in ("hub", "sort-digits")


def build(folder, entries):
    selected = load("prompts", "mixture")
    config = selected.component.config.model_validate({"sources": entries})
    return selected.build(config, TaskContext(seed=0, base_folder=folder))
