"""Order, held-out records, encoding and lengths of the prompt stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import DataError
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }},{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


class Lines(list):
    def describe(self, index):
        return f"file:{index + 1}"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("0123456789+=abcdefghijklmnopqrstuvwxyz:,")


@pytest.fixture
def chat_tokenizer():
    tokenizer = tiny_tokenizer("0123456789+=abcdefghijklmnopqrstuvwxyz:,")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def numbered(count):
    return Lines({"prompt": f"{index}=", "answer": str(index), "level": index % 3} for index in range(count))


class TestOrder:
    @given(st.integers(2, 40), st.integers(0, 5), st.integers(0, 3))
    def test_every_epoch_takes_every_training_record_once(self, tokenizer, count, seed, epoch):
        held_out = count // 3
        stream = prompt_stream(numbered(count), tokenizer, seed=seed, held_out=held_out)
        size = len(stream.training)
        assert size == count - held_out
        taken = [stream.at(epoch * size + place)[0]["prompt"] for place in range(size)]
        kept_back = [record["prompt"] for record, _ in stream.held_out()]
        assert len(kept_back) == held_out
        assert sorted(taken + kept_back) == sorted(record["prompt"] for record in numbered(count))

    def test_epochs_and_seeds_differ_and_repeat(self, tokenizer):
        def order(seed, epoch):
            stream = prompt_stream(numbered(20), tokenizer, seed=seed)
            return [stream.at(position)[0]["prompt"] for position in range(20 * epoch, 20 * epoch + 20)]

        assert order(0, 0) == order(0, 0)
        assert order(0, 0) != order(0, 1) != order(1, 1)

    def test_a_position_does_not_depend_on_what_was_asked_before(self, tokenizer):
        fresh = prompt_stream(numbered(7), tokenizer, seed=3)
        used = prompt_stream(numbered(7), tokenizer, seed=3)
        for position in range(50):
            used.at(position)
        assert fresh.at(23) == used.at(23)

    def test_fewer_held_out_records_are_a_prefix_of_more(self, tokenizer):
        few = prompt_stream(numbered(30), tokenizer, seed=1, held_out=4).held_out()
        more = prompt_stream(numbered(30), tokenizer, seed=1, held_out=9).held_out()
        assert more[:4] == few

    def test_digest_is_of_the_records(self, tokenizer):
        first, same = prompt_stream(numbered(5), tokenizer, seed=0), prompt_stream(numbered(5), tokenizer, seed=1)
        assert first.digest == same.digest != prompt_stream(numbered(6), tokenizer, seed=0).digest

    @pytest.mark.parametrize(("count", "held_out"), [(0, 0), (3, 3), (3, 5)])
    def test_nothing_to_train_on(self, tokenizer, count, held_out):
        with pytest.raises(DataError, match="leave none to train on"):
            prompt_stream(numbered(count), tokenizer, seed=0, held_out=held_out)


class TestEncoding:
    def test_text_is_encoded_as_it_is(self, tokenizer):
        prompt = prompt_stream(numbered(1), tokenizer, seed=0).prompt(9)
        assert (prompt.position, prompt.text, prompt.messages) == (9, "0=", None)
        assert prompt.prompt_ids == tuple(tokenizer("0=")["input_ids"])
        assert (prompt.answer, prompt.metadata) == ("0", {"level": 0})

    def test_special_tokens_are_the_tokenizers_business(self, tokenizer):
        from tokenizers.processors import TemplateProcessing

        adding = tiny_tokenizer("0123456789+=")
        adding.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", adding.bos_token_id)]
        )
        prompt = prompt_stream(numbered(1), adding, seed=0).prompt(0)
        assert prompt.prompt_ids == (adding.bos_token_id, *tokenizer("0=")["input_ids"])

    def test_messages_go_through_the_chat_template(self, chat_tokenizer):
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
        prompt = prompt_stream(Lines([{"prompt": messages}]), chat_tokenizer, seed=0).prompt(0)
        assert prompt.text == "s:be kind,u:hi,a:"
        assert prompt.messages == tuple(messages)
        assert prompt.prompt_ids == tuple(chat_tokenizer(prompt.text, add_special_tokens=False)["input_ids"])

    def test_text_and_messages_may_be_mixed(self, chat_tokenizer):
        records = Lines([{"prompt": "hi"}, {"prompt": [{"role": "user", "content": "hi"}]}])
        stream = prompt_stream(records, chat_tokenizer, seed=0, max_prompt_tokens=2)
        assert (stream.counts["too_long"], stream.prompt(0).text) == (1, "hi")

    def test_lengths_are_those_of_the_encoded_prompts(self, chat_tokenizer):
        records = [{"prompt": "abc"}, {"prompt": [{"role": "user", "content": "1+1"}]}, {"prompt": "<eos>é"}]
        chat_tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)  # a call leaves its settings behind
        encoder = PromptEncoder(chat_tokenizer)
        lengths = encoder.lengths(records, ["x"] * 3)
        assert lengths == [len(encoder.prompt(record, 0, "x").prompt_ids) for record in records] == [3, 8, 2]

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (None, "`prompt` is missing"),
            (3, "a int, not text"),
            ([], "an empty list"),
            (["hi"], "needs `role` and `content`"),
            ([{"role": "user"}], "needs `role` and `content`"),
            ("", "is empty"),
        ],
    )
    def test_what_is_no_prompt_is_named(self, chat_tokenizer, prompt, message):
        with pytest.raises(DataError, match=message) as caught:
            prompt_stream(Lines([{"prompt": "a"}, {"prompt": prompt}]), chat_tokenizer, seed=0)
        assert caught.value.where == "file:2"

    def test_no_chat_template(self, tokenizer):
        records = Lines([{"prompt": [{"role": "user", "content": "hi"}]}])
        with pytest.raises(DataError, match="lacks a chat template"):
            prompt_stream(records, tokenizer, seed=0)

    @pytest.mark.parametrize(
        ("template", "says"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ 1 + messages[0]['content'] }}", "unsupported operand"),  # a bare TypeError
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
            ("{{ range(10 ** 9) | list }}", "Range too big"),
            ("{{ 1 / 0 }}", "division by zero"),
            ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ],
    )
    def test_a_template_that_refuses(self, chat_tokenizer, template, says):
        chat_tokenizer.chat_template = template
        records = Lines([{"prompt": [{"role": "user", "content": "hi"}]}])
        with pytest.raises(DataError, match=says):
            prompt_stream(records, chat_tokenizer, seed=0)

    def test_a_source_without_describe_is_named_by_number(self, tokenizer):
        with pytest.raises(DataError) as caught:
            prompt_stream([{"prompt": "a"}, {}], tokenizer, seed=0)
        assert caught.value.where == "record 2"


class TestLength:
    RECORDS = Lines({"prompt": "a" * length} for length in (1, 5, 2, 6, 3))

    def test_too_long_ones_are_counted_and_skipped(self, tokenizer):
        stream = prompt_stream(self.RECORDS, tokenizer, seed=0, max_prompt_tokens=3, held_out=1)
        assert (stream.counts["too_long"], len(stream)) == (2, 2)
        texts = [stream.prompt(position).text for position in range(20)]
        texts += [prompt.text for prompt in stream.evaluation_prompts()]
        assert set(map(len, texts)) == {1, 2, 3}

    def test_or_are_an_error(self, tokenizer):
        with pytest.raises(DataError, match=r"file:2: .* 5 tokens, more than max_prompt_tokens \(3\)") as caught:
            prompt_stream(self.RECORDS, tokenizer, seed=0, max_prompt_tokens=3, too_long="error")
        assert "2 of 5 records are wrong" in caught.value.message and "file:4" in caught.value.message

    def test_a_stream_left_empty_is_an_error(self, tokenizer):
        with pytest.raises(DataError, match="5 more were refused") as caught:
            prompt_stream(self.RECORDS[:], tokenizer, seed=0, max_prompt_tokens=0)
        assert "max_prompt_tokens" in caught.value.hint

    def test_evaluation_prompts_are_a_stream_of_their_own(self, tokenizer):
        stream = prompt_stream(numbered(10), tokenizer, seed=0, held_out=4)
        prompts = stream.evaluation_prompts()
        assert [prompt.position for prompt in prompts] == [0, 1, 2, 3]
        assert [prompt.answer for prompt in prompts] == [record["answer"] for record in stream.evaluation_records()]
