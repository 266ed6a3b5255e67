"""Records of unknown number: in their order, read as they are drawn."""

import pytest

from rlhf_core.errors import DataError
from rlhf_data.streamed import StreamedRecords
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("0123456789=abc")


class Numbers:
    """A stream of unknown length."""

    def __init__(self, count):
        self.count = count
        self.read = 0

    def __iter__(self):
        for index in range(self.count):
            self.read += 1
            yield {"prompt": f"{index}=", "answer": str(index)}

    def make_stream(self, rules, *, seed, held_out):
        return StreamedRecords(self, rules, held_out=held_out)


def test_positions_are_records_in_order_and_begin_again(tokenizer):
    stream = prompt_stream(Numbers(5), tokenizer, seed=0, held_out=2)
    assert [stream.prompt(position).answer for position in range(7)] == ["2", "3", "4", "2", "3", "4", "2"]
    assert [prompt.answer for prompt in stream.evaluation_prompts()] == ["0", "1"]
    with pytest.raises(TypeError, match="the length of a streamed source is unknown"):
        len(stream)


def test_a_resume_reads_up_to_its_place(tokenizer):
    first = prompt_stream(Numbers(10_000), tokenizer, seed=0, max_prompt_tokens=4)
    again = prompt_stream(Numbers(10_000), tokenizer, seed=0, max_prompt_tokens=4)
    assert again.prompt(900) == [first.prompt(position) for position in range(901)][-1]
    assert first.prompt(3).answer == "3", "an earlier one may be asked for again"
    assert first.digest == again.digest


def test_it_is_read_as_it_is_drawn(tokenizer):
    source = Numbers(1 << 40)
    stream = prompt_stream(source, tokenizer, seed=0)
    before = source.read
    stream.prompt(5)
    assert source.read - before <= 5


def test_filters_and_wrong_records(tokenizer):
    stream = prompt_stream(Numbers(20), tokenizer, seed=0, keep=lambda record: int(record["answer"]) % 5 == 0)
    assert [stream.prompt(position).answer for position in range(5)] == ["0", "5", "10", "15", "0"]
    with pytest.raises(DataError, match="all records are held out"):
        prompt_stream(Numbers(20), tokenizer, seed=0, keep=lambda record: False)

    class Wrong(Numbers):
        def __iter__(self):
            yield from super().__iter__()
            yield {"prompt": None}

    with pytest.raises(DataError, match="`prompt` is missing") as caught:
        prompt_stream(Wrong(20), tokenizer, seed=0)
    assert caught.value.where == "record 21"


def test_wrong_records_at_the_beginning_are_counted(tokenizer):
    class Wrong(Numbers):
        def __iter__(self):
            return (
                {"prompt": None if record["answer"] in "258" else record["prompt"]} for record in super().__iter__()
            )

    with pytest.raises(DataError, match=r"`prompt` is missing.* \(and 2 more of the first 9 records\)") as caught:
        prompt_stream(Wrong(9), tokenizer, seed=0)
    assert caught.value.where == "record 3"


def test_a_filter_that_fails_is_named_with_the_record(tokenizer):
    with pytest.raises(DataError, match="prompts.filter failed: KeyError: 'language'") as caught:
        prompt_stream(Numbers(1), tokenizer, seed=0, keep=lambda record: record["language"] == "en")
    assert caught.value.where == "record 1"
