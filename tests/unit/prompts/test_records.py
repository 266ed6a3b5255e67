"""Every record is checked once, all wrong ones are told with their numbers, and filters are counted."""

import hashlib
import json
import random
import re
from types import SimpleNamespace

import pytest

from rlhf_core.errors import DataError, PluginError
from rlhf_core.prompts import PromptStream
from rlhf_core.prompts.jsonl import JsonlSource
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_tokenizer

WRONG = (
    b"{not json",
    b"",
    b"[1]",
    b'{"answer": "x"}',
    b'{"prompt": 3}',
    b'{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ""}',
    b'\xff{"prompt": "a"}',
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("0123456789=abc")


def test_a_thousand_wrong_lines_are_all_found_with_their_numbers(tmp_path, tokenizer):
    chosen = sorted(random.Random(0).sample(range(5000), 1000))
    lines = [json.dumps({"prompt": f"{index}="}).encode() for index in range(5000)]
    for place, index in enumerate(chosen):
        lines[index] = WRONG[place % len(WRONG)]
    (tmp_path / "p.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError) as caught:
        prompt_stream(JsonlSource(tmp_path / "p.jsonl"), tokenizer, seed=0, measured=1000)
    message = caught.value.message
    assert message.startswith("1000 of 5000 records are wrong")
    assert f"{tmp_path / 'p.jsonl'}:{chosen[0] + 1}: the line is not JSON" in message
    told = re.search(r"counted from 1: ([\d, -]+)$", message)[1]
    numbers = []
    for part in told.split(", "):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    assert numbers == [index + 1 for index in chosen]


def test_a_wrong_record_after_the_first_is_found_whatever_the_source(tokenizer):
    def needs_completion(record, name):
        if not isinstance(record.get("completion"), str):
            raise DataError("the record has no completion text", where="sft")

    records = [{"prompt": "1=", "completion": "1"}] * 7 + [{"prompt": "1="}]
    with pytest.raises(DataError, match="no completion text") as caught:
        prompt_stream(records, tokenizer, seed=0, check=needs_completion)
    assert caught.value.where == "record 8"


def test_a_check_measures_a_sample_only(tokenizer, monkeypatch):
    from rlhf_core.prompts.encoder import PromptEncoder

    asked = []
    lengths = PromptEncoder.lengths
    monkeypatch.setattr(PromptEncoder, "lengths", lambda self, r, n: asked.extend(r) or lengths(self, r, n))
    prompt_stream([{"prompt": f"{index}="} for index in range(5000)], tokenizer, seed=0, measured=1000)
    assert len(asked) == 1000 and asked[1]["prompt"] == "5="


def test_filters_are_counted_by_reason(tokenizer):
    records = [{"prompt": text, "language": "en"} for text in ("1=", "2=", "1=", "123456=")]
    records += [{"prompt": "3=", "language": "de"}, {"prompt": "2=", "language": "de"}]
    stream = prompt_stream(
        records,
        tokenizer,
        seed=0,
        max_prompt_tokens=3,
        skip_duplicates=True,
        keep=lambda record: record["language"] == "en",
    )
    assert stream.counts == {"records": 6, "too_long": 1, "duplicates": 2, "filtered": 1}
    assert sorted(stream.prompt(position).text for position in range(len(stream))) == ["1=", "2="]


def test_a_filter_that_fails_is_named_with_the_record(tokenizer):
    with pytest.raises(DataError, match="prompts.filter failed: KeyError: 'language'") as caught:
        prompt_stream([{"prompt": "1="}], tokenizer, seed=0, keep=lambda record: record["language"] == "en")
    assert caught.value.where == "record 1"


def test_a_file_has_the_digest_of_its_bytes(tmp_path, tokenizer):
    records = [{"prompt": "1=", "answer": "1"}, {"prompt": "2="}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    stream = prompt_stream(JsonlSource(tmp_path / "p.jsonl"), tokenizer, seed=0)
    assert stream.digest == hashlib.sha256((tmp_path / "p.jsonl").read_bytes()).hexdigest()


class Countdown:
    """A source with an order of its own: the records from the last to the first."""

    def __init__(self, count):
        self.source = [{"prompt": f"{index}="} for index in range(count)]

    def make_stream(self, rules, *, seed, held_out):
        records = PromptStream(self.source, rules, seed=seed, held_out=held_out)
        training = records.training
        records.order = SimpleNamespace(index=lambda position: training[-1 - position % len(training)])
        return records


def test_a_source_may_bring_its_own_order(tokenizer):
    stream = prompt_stream(Countdown(5), tokenizer, seed=0, keep=lambda record: record["prompt"] != "3=")
    assert [stream.prompt(position).text for position in range(5)] == ["4=", "2=", "1=", "0=", "4="]
    assert stream.prompt(0, 1).text == "1=" and stream.counts["filtered"] == 1


def test_a_source_without_length_and_order_is_told_what_to_do(tokenizer):
    with pytest.raises(PluginError, match="a map lacks a length, so its records cannot be ordered") as caught:
        prompt_stream(map(dict, [{"prompt": "1="}]), tokenizer, seed=0)
    assert "mixture" in caught.value.hint and "make_stream" in caught.value.hint


def test_a_record_that_is_no_mapping_is_named(tokenizer):
    with pytest.raises(DataError, match="the record is a str, not a mapping") as caught:
        prompt_stream(["1=", "2="], tokenizer, seed=0)
    assert "record 1" in str(caught.value)
