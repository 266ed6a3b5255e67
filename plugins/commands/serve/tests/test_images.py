"""Chats with images, answered by a model that sees."""

import asyncio
import base64
from io import BytesIO
from pathlib import Path

import openai
import pytest
from PIL import Image
from served_clients import served_client

from rlhf_core.config import ModelConfig
from rlhf_core.models import model_kind_for
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_images import ImageLimits, ImageReader, read_images
from rlhf_models import open_engine
from rlhf_serve.seeing import MAX_PIXELS
from rlhf_testing.models import save_tiny_model

VISION = ModelConfig(path="builtin:tiny-vision", device="cpu")


def client_of(config):
    return served_client(config, max_new_tokens=4)


def address(size=(32, 32), color=200):
    file = BytesIO()
    Image.new("L", size, color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def question(*addresses, role="user"):
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in addresses]
    return [{"role": role, "content": [{"type": "text", "text": "Which "}, *parts, {"type": "text", "text": "digit?"}]}]


async def refusal_of(client, messages, **options):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="mine", messages=messages, **options)
    return caught.value.message


def expected_text(image_address):
    """Answer to `question` from the engine itself, for the prompt that a run would have."""
    kind = model_kind_for(VISION)
    opened = open_engine(VISION, "hf", 0)
    parts = [{"type": "text", "text": "Which "}, {"type": "image", "url": image_address}]
    record = {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "digit?"}]}]}
    record = read_images(record, ImageReader(ImageLimits(), Path()))
    prompt = PromptEncoder(opened.tokenizer, kind=kind).prompt(record, 0, "prompt")
    request = GenerationRequest(sample_id=0, prompt_ids=prompt.prompt_ids, inputs=prompt.columns.model_inputs)
    (answer,) = opened.engine.generate([request], SamplingParams(max_new_tokens=4, greedy=True))
    return opened.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True), len(prompt.prompt_ids)


def test_the_answer_to_an_image_is_that_of_the_engine():
    async def ask():
        async with client_of(VISION) as client:
            reply = await client.chat.completions.create(model="mine", messages=question(address()), temperature=0)
            return reply.choices[0].message.content, reply.usage.prompt_tokens

    assert asyncio.run(ask()) == expected_text(address())


def test_a_block_of_anthropic_is_the_same_question():
    data = address().partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "text", "text": "Which "}, {"type": "image", "source": source}]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "digit?"}]}]

    async def ask():
        async with client_of(VISION) as client:
            body = {"model": "mine", "max_tokens": 4, "temperature": 0, "messages": messages}
            reply = await client.post("/messages", body=body, cast_to=dict)
            count = await client.post(
                "/messages/count_tokens", body={"model": "mine", "messages": messages}, cast_to=dict
            )
            return "".join(block["text"] for block in reply["content"]), count["input_tokens"]

    assert asyncio.run(ask()) == expected_text(address())


def test_a_part_of_responses_is_the_same_question():
    parts = [{"type": "input_text", "text": "Which "}, {"type": "input_image", "image_url": address()}]
    question = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "digit?"}]}]

    async def ask():
        async with client_of(VISION) as client:
            reply = await client.responses.create(model="mine", input=question, temperature=0)
            count = await client.responses.input_tokens.count(model="mine", input=question)
            again = await client.responses.create(
                model="mine", input="Sure?", previous_response_id=reply.id, temperature=0
            )
            return reply.output_text, count.input_tokens, again.usage.input_tokens

    text, num_tokens, num_later = asyncio.run(ask())
    assert (text, num_tokens) == expected_text(address())
    assert num_later > num_tokens  # with the image of the earlier response


def test_what_is_refused():
    async def ask():
        async with client_of(VISION) as client:
            for sent in ("https://example.org/x.png", "digits/0.png", "file:///etc/passwd"):
                assert "with base64 in the request itself" in await refusal_of(client, question(sent))
            assert "pixels" in await refusal_of(client, question(address((2049, MAX_PIXELS // 2048))))
            assert "is not base64" in await refusal_of(client, question("data:image/png;base64,!"))
            assert "cannot contain images" in await refusal_of(client, question(address(), role="system"))
            assert "logprobs" in await refusal_of(client, question(address()), logprobs=True)
            tool = {"type": "function", "function": {"name": "now"}}
            assert "cannot have tools" in await refusal_of(client, question(address()), tools=[tool])
            for part in ({"image_url": "https://example.org/x.png"}, {"file_id": "file-1"}):
                given = [{"role": "user", "content": [{"type": "input_image", **part}]}]
                with pytest.raises(openai.BadRequestError, match="with base64 in the request itself"):
                    await client.responses.create(model="mine", input=given)
            unknown = [{"role": "user", "content": [{"type": "input_audio"}]}]
            assert "parts of the types text, image_url" in await refusal_of(client, unknown)

    asyncio.run(ask())


def test_a_model_that_does_not_see_refuses_images(tmp_path):
    async def ask():
        async with client_of(ModelConfig(path=str(save_tiny_model(tmp_path)), device="cpu")) as client:
            return await refusal_of(client, question(address()))

    assert "does not accept images" in asyncio.run(ask())
