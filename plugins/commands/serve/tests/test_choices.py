"""Several answers to a prompt, log-probs, echo and prompts of token ids, by the real client."""

import asyncio
import math
from contextlib import asynccontextmanager, closing

import openai
import pytest
import torch
from adding_agent import ADD, QUESTION
from chat_templates import chat_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.config import ModelConfig
from rlhf_core.errors import DivergenceError
from rlhf_episodes import Keys
from rlhf_forward import ScoredRow, score_rows
from rlhf_models import OpenEngine
from rlhf_serve.logprobs import describe
from rlhf_serve.server import start
from rlhf_serve.serving import ServedModel, serve_model
from rlhf_testing.engine import FakeEngine
from rlhf_testing.models import save_tiny_model, tiny_model, tiny_tokenizer
from rlhf_web import ServerLimits

PROMPT = "31>"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def client_of(served):
    """The real client of a model that is served."""
    with closing(served) as model:
        keys = Keys()
        server = await start(keys.find, host="127.0.0.1", port=0, limits=ServerLimits(), model="mine")
        try:
            async with openai.AsyncOpenAI(base_url=server.base_url, api_key=keys.add(model), max_retries=0) as client:
                yield client
        finally:
            server.close()
            await asyncio.sleep(0)


def ask(path, work, *, max_new_tokens=8):
    """Run `work` with a client of the model."""

    async def run():
        config = ModelConfig(path=str(path), device="cpu")
        async with client_of(serve_model(config, engine="hf", seed=0, max_new_tokens=max_new_tokens)) as client:
            return await work(client)

    return asyncio.run(run())


def expected(path, ids):
    """Log-probs [len(ids) - 1, V] of each next token, by a plain forward pass of the model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def ids_of(path, text):
    return AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False)["input_ids"]


def close(found, wanted):
    return found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.5, "top_p": 0.8, "seed": 3}], ids=str)
def test_log_probs_of_completions_are_those_of_a_forward_pass(tiny, sampling):
    """Of the model itself, whatever temperature and truncation the answer was sampled with."""

    async def work(client):
        return await client.completions.create(model="mine", prompt=PROMPT, logprobs=3, echo=True, **sampling)

    choice = ask(tiny, work).choices[0]
    logprobs, text = choice.logprobs, choice.text
    assert text.startswith(PROMPT)
    ids = ids_of(tiny, "".join(logprobs.tokens))
    assert len(ids) == len(logprobs.tokens) == len(logprobs.text_offset)
    wanted = expected(tiny, ids)
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert close(logprobs.token_logprobs[1:], [float(row[token]) for row, token in zip(wanted, ids[1:], strict=True)])
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for row, token, top, own in zip(
        wanted, logprobs.tokens[1:], logprobs.top_logprobs[1:], logprobs.token_logprobs[1:], strict=True
    ):
        best = {tokenizer.decode([int(each)]): float(row[each]) for each in row.topk(3).indices}
        assert set(top) == {*best, token}
        assert all(close(top[each], value) for each, value in best.items()) and top[token] == own
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text.startswith(token, offset) or token in tokenizer.all_special_tokens


def test_log_probs_without_an_answer_and_for_token_ids(tiny):
    """What an evaluation sends: prompts of several lengths as token ids, and at most one token to sample."""
    prompts = [ids_of(tiny, text) for text in ("31>13", "5>5", "9021>0129")]

    async def work(client):
        asked = {"model": "mine", "prompt": prompts, "logprobs": 1, "echo": True, "temperature": 0}
        return [await client.completions.create(**asked, max_tokens=count) for count in (0, 1)]

    without, one = ask(tiny, work)
    assert [each.text for each in without.choices] == ["31>13", "5>5", "9021>0129"]
    assert (without.usage.completion_tokens, one.usage.completion_tokens) == (0, 3)
    assert {each.finish_reason for each in without.choices} == {"length"}
    for ids, empty, single in zip(prompts, without.choices, one.choices, strict=True):
        rows = expected(tiny, ids)
        wanted = [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]
        assert close(empty.logprobs.token_logprobs[1:], wanted)
        assert close(single.logprobs.token_logprobs[1:-1], wanted)
        best = [max(top.values()) for top in single.logprobs.top_logprobs[1:-1]]
        assert close(best, rows.max(-1).values.tolist())
        assert single.logprobs.token_logprobs[-1] == max(single.logprobs.top_logprobs[-1].values()), "it is greedy"


def test_token_ids_continue_as_their_text_does(tiny):
    async def work(client):
        asked = {"model": "mine", "temperature": 0}
        by_text = await client.completions.create(prompt=PROMPT, **asked)
        by_ids = await client.completions.create(prompt=ids_of(tiny, PROMPT), **asked)
        with pytest.raises(openai.BadRequestError, match="prompt: token ids are below 16, got 99"):
            await client.completions.create(prompt=[4, 99], **asked)
        with pytest.raises(openai.BadRequestError, match="has 600 tokens, the model's limit is 512"):
            await client.completions.create(prompt=[5] * 600, echo=True, max_tokens=0, **asked)
        whole = await client.completions.create(prompt=[5] * 512, echo=True, max_tokens=0, logprobs=0, **asked)
        return by_text.choices[0].text, by_ids.choices[0].text, whole.choices[0].logprobs

    by_text, by_ids, whole = ask(tiny, work)
    assert by_ids == by_text and len(whole.token_logprobs) == 512
    assert whole.top_logprobs[5] == {"1": whole.token_logprobs[5]}, "0 lists the token itself"


def test_several_answers_have_their_own_seeds_and_one_prompt(tiny):
    async def work(client):
        asked = {"model": "mine", "max_tokens": 6}
        found = await client.completions.create(prompt=[PROMPT, "2>"], n=3, seed=5, **asked)
        single = [
            (await client.completions.create(prompt=prompt, seed=5 + index, **asked)).choices[0].text
            for index, prompt in enumerate([PROMPT] * 3 + ["2>"] * 3)
        ]
        free = await client.completions.create(prompt=PROMPT, n=8, **asked)
        greedy = await client.completions.create(prompt=PROMPT, n=2, temperature=0, **asked)
        return found, single, free, greedy

    found, single, free, greedy = ask(tiny, work)
    assert [each.index for each in found.choices] == list(range(6))
    assert [each.text for each in found.choices] == single
    assert found.usage.prompt_tokens == 3 + 2, "a prompt counts once"
    assert len({each.text for each in free.choices}) > 1
    assert len({each.text for each in greedy.choices}) == 1


def test_all_answers_of_a_request_are_computed_in_one_batch():
    class Counts(FakeEngine):
        generate_in_flight = None

    engine, tokenizer = Counts(), tiny_tokenizer()

    async def work():
        served = ServedModel(OpenEngine(engine, tokenizer, tiny_model(tokenizer)), max_new_tokens=4)
        async with client_of(served) as client:
            return await client.completions.create(model="mine", prompt=["3>", "4>"], n=4, logprobs=1)

    assert len(asyncio.run(work()).choices) == 8
    assert [len(batch) for batch in engine.calls] == [8]


@pytest.mark.slow
def test_a_stream_names_the_choice_of_each_part(tool_model):
    async def work(client):
        asked = {"model": "mine", "messages": QUESTION, "n": 3, "seed": 1, "logprobs": True, "top_logprobs": 2}
        found = await client.chat.completions.create(**asked, max_tokens=5)
        stream = await client.chat.completions.create(
            **asked, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        return found, [chunk async for chunk in stream]

    found, chunks = ask(tool_model, work, max_new_tokens=90)
    assert chunks[-1].usage == found.usage and not chunks[-1].choices
    for choice in found.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[0].logprobs.model_dump() == choice.logprobs.model_dump()
        assert parts[-1].finish_reason == choice.finish_reason


@pytest.mark.slow
def test_log_probs_of_a_chat(tool_model):
    async def work(client):
        asked = {"model": "mine", "messages": QUESTION, "temperature": 0.7, "seed": 2, "max_tokens": 6}
        found = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=4)
        bare = await client.chat.completions.create(**asked, logprobs=True)
        none = await client.chat.completions.create(**asked)
        return found.choices[0], bare.choices[0], none.choices[0]

    found, bare, none = ask(tool_model, work)
    tokenizer = AutoTokenizer.from_pretrained(tool_model)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    content = found.logprobs.content
    start = len(ids_of(tool_model, prompt)) - 1
    wanted = expected(tool_model, ids_of(tool_model, prompt + "".join(each.token for each in content)))[start:]
    for each, row in zip(content, wanted, strict=True):
        (token,) = ids_of(tool_model, each.token)
        assert close(each.logprob, float(row[token])) and each.bytes == list(each.token.encode())
        assert close([top.logprob for top in each.top_logprobs], row.topk(4).values.tolist())
    assert found.message.content == "".join(each.token for each in content).removesuffix("<eos>")
    assert [each.top_logprobs for each in bare.logprobs.content] == [[]] * len(content)
    assert none.logprobs is None and none.message == found.message


def test_calls_of_tools_have_other_ids_in_each_answer(tool_model):
    async def work(client):
        asked = {"model": "mine", "messages": QUESTION, "tools": [ADD], "temperature": 0, "n": 3}
        return await client.chat.completions.create(**asked)

    choices = ask(tool_model, work, max_new_tokens=90).choices
    assert len({call.id for choice in choices for call in choice.message.tool_calls}) == 3


def test_parts_of_a_character_and_the_spaces_of_words_make_up_the_text():
    tokenizer = chat_tokenizer("qwen2")
    text = "Grüße, 世界 😀!"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = tiny_model(tokenizer)
    (scores,) = score_rows(model, [ScoredRow((0, *ids), 1)], 2)
    tokens = describe(tokenizer, ids, scores)
    assert "".join(each.text for each in tokens) == text
    assert all(len(each.top) == 2 and math.isfinite(each.logprob) for each in tokens)


def test_rows_that_do_not_fit_together_have_the_same_scores(monkeypatch):
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    rows = [
        ScoredRow(tuple(torch.randint(4, 16, (length,), generator=generator).tolist()), first)
        for length, first in ((9, 1), (3, 2), (30, 7), (2, 1), (5, 5))
    ]
    together = score_rows(model, rows, 3)
    assert [len(each) for each in together] == [8, 1, 23, 1, 0]
    passes = []

    def run(work):
        passes.append(work)
        return work()

    monkeypatch.setattr("rlhf_forward.token_scores._MAX_LOGITS", 16 * 10)
    monkeypatch.setattr("rlhf_forward.token_scores._SLICE", 4)
    apart = score_rows(model, rows, 3, run)
    assert len(passes) == 5, "the row of 23 tokens is in three parts"
    for one, other in zip(together, apart, strict=True):
        assert [each.top_ids for each in one] == [each.top_ids for each in other]
        assert close([each.logprob for each in one], [each.logprob for each in other])


def test_weights_that_have_diverged_are_an_error():
    model = tiny_model()
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(DivergenceError, match="not finite"):
        score_rows(model, [ScoredRow((4, 5), 1)], 1)


def test_a_request_for_too_many_log_probs_is_refused(tiny, monkeypatch):
    monkeypatch.setattr("rlhf_serve.serving._MAX_LOGPROBS", 2**20)

    async def work(client):
        asked = {"model": "mine", "prompt": "3>", "n": 128, "max_tokens": 450}
        with pytest.raises(openai.BadRequestError, match=r"might have 1209600 log-probs.*set a smaller n, max_tokens"):
            await client.completions.create(**asked, logprobs=20)
        return await client.completions.create(**{**asked, "max_tokens": 1}, logprobs=20)

    assert len(ask(tiny, work, max_new_tokens=500).choices) == 128


def test_bytes_that_never_become_a_character_are_decoded_in_short_pieces(monkeypatch):
    tokenizer = chat_tokenizer("qwen2")
    (token,) = tokenizer.convert_tokens_to_ids(["Ģ"])  # the byte 0x80, which is inside of a character only
    lengths, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: lengths.append(len(ids)) or decode(ids, **options))
    tokens = describe(tokenizer, [token] * 50, [])
    assert "".join(each.text for each in tokens) == decode([token] * 50)[: 50 - 50 % 4]
    assert max(lengths) <= 8
