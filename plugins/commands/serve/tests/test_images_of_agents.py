"""Images that an agent sends to its episode's endpoint, in every dialect, equal those of observations."""

import base64
from io import BytesIO
from pathlib import Path

import pytest
import torch
from dialect_clients import CLIENTS, Chat, Messages, client_of
from playing import Reworded, driven, items, play_one
from seeing_models import Seeing, picture, write_folder

from rlhf_core.batching import collate
from rlhf_core.components import EngineContext
from rlhf_episodes import Outcome
from rlhf_episodes.sight import Sight
from rlhf_forward import policy_forward
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine
from rlhf_images import ImageLimits

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SMALL, WIDE, HIGH = (40, 30), (50, 20), (16, 24)
LOOK = [("Look: ", SMALL), (WIDE, " and ", HIGH, "?"), ("Again: ", SMALL)]
"""Texts and sizes of images of the messages of one episode."""


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llava"
    write_folder("llava", folder)
    return Seeing(folder)


@pytest.fixture(params=CLIENTS)
def kind(request):
    return request.param


def file_of(size):
    file = BytesIO()
    picture(size).save(file, "PNG")
    return file.getvalue()


def address_of(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(kind, each):
    """A part of a message in the form of a dialect: a text, the size or bytes of an image, or its address."""
    if isinstance(each, str) and not each.startswith(("data:", "http", "./")):
        return {"type": "text" if kind in (Chat, Messages) else "input_text", "text": each}
    if not isinstance(each, str):
        each = address_of(each if isinstance(each, bytes) else file_of(each))
    if kind is Chat:
        return {"type": "image_url", "image_url": {"url": each}}
    if kind is not Messages:
        return {"type": "input_image", "image_url": each}
    if not each.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": each}}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": each.partition(",")[2]}}


def asked(kind, *content):
    return {"role": "user", "content": [part(kind, each) for each in content]}


def shown(*content):
    """The same message as an observation."""
    return asked(Chat, *content)


def engine_of(seeing):
    return HfEngine(HfEngineConfig(), EngineContext(seeing.model, seeing.tokenizer, torch.device("cpu"), seed=3))


def play(seeing, run, *, limits=None, fetch=None, **options):
    sight = Sight(seeing.kind, limits or ImageLimits(), Path(), fetch)
    options = {"engine": engine_of(seeing), "max_new_tokens": 5, "max_turns": 9, "sight": sight, **options}
    prompt = options.pop("prompt", None) or seeing.prompt("Which ", SMALL, " is it?")
    return play_one(driven(run), tokenizer=seeing.tokenizer, prompt=prompt, timeout_seconds=60.0, **options)


def play_agent(seeing, kind, function, **options):
    async def run(task, policy):
        async with client_of(kind, await policy.endpoint()) as client:
            await function(client, list(task.prompt.messages or ()))
        return Outcome()

    return play(seeing, run, **options)


def gap(seeing, *found):
    batch = collate(list(found))
    with torch.no_grad():
        output = policy_forward(seeing.model, batch, 1.0)
    return float((output.log_probs - batch.action_log_probs)[batch.action_mask].abs().max())


async def refused(client, history, reason, **options):
    with pytest.raises(client.statuses["bad"]) as caught:
        await client.ask(history, **options)
    assert client.code(caught.value) == "invalid_request" and reason in caught.value.message


def test_images_of_a_client_are_those_of_observations(llava, kind):
    """Row, columns and log-probs, with the prompt's image by its marker, and one image a second time."""

    async def agent(client, history):
        history = [*history, *(await client.ask(history)).back]
        for content in LOOK:
            history = [*history, asked(kind, *content)]
            reply = await client.ask(history)
            if kind is not Chat:
                assert await client.count(history) == reply.num_tokens[0]
            history += reply.back

    async def environment(task, policy):
        await policy.turn()
        for content in LOOK:
            await policy.turn([shown(*content)])
        return Outcome()

    ours, theirs = play_agent(llava, kind, agent), play(llava, environment)
    (item,), (other,) = items(ours), items(theirs)
    assert gap(llava, item) < 1e-4
    assert torch.equal(item.prompt_ids, other.prompt_ids) and torch.equal(item.response_ids, other.response_ids)
    assert torch.equal(item.action_log_probs, other.action_log_probs)
    assert item.columns.keys() == other.columns.keys()
    for name in ("images_pixels", "images_tokens", "observed_pixels", "observed_tokens"):
        assert torch.equal(item.columns[name], other.columns[name]), name
    assert len(item.columns["images_sizes"]) == 1 and len(item.columns["observed_sizes"]) == 4
    references = [played.prompt.metadata["images"] for played in (ours, theirs)]
    assert references[0] == references[1] and len(references[0]) == 4
    assert [turn.text for turn in ours.rows[0].turns] == [turn.text for turn in theirs.rows[0].turns]


def test_an_edited_history_opens_a_branch_with_its_images(llava, kind):
    async def agent(client, history):
        first = await client.ask([asked(kind, "One ", SMALL)])
        await client.ask([asked(kind, "One ", SMALL), *first.back, asked(kind, WIDE)])
        await client.ask([asked(kind, "One ", HIGH), *client.edited("Well"), asked(kind, WIDE)])

    found = items(play_agent(llava, kind, agent))
    assert [len(each.columns["images_sizes"]) for each in found] == [1, 2]
    assert [len(each.columns["observed_sizes"]) for each in found] == [1, 0]
    assert gap(llava, *found) < 1e-4


def test_the_result_of_a_tool_may_have_images(llava, kind):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

    async def agent(client, history):
        question = client.user("Look.")
        first = await client.ask(question, tools=True)
        ((name, _),) = first.calls
        assert name == "add"
        (result,) = client.result(first, "")
        content = [part(kind, each) for each in ("Done: ", SMALL)]
        if kind is Chat:
            result["content"] = content
        elif kind is Messages:
            result["content"][0]["content"] = content
        else:
            result["output"] = content
        await client.ask([*question, *first.back, result], tools=True)

    engine = Reworded(llava.tokenizer, [call, "Nice."])
    (item,) = items(play_agent(llava, kind, agent, engine=engine, max_new_tokens=99))
    assert int((item.response_ids == llava.kind.image_token_id).sum()) == 9
    assert "<tool_response>\nDone: <image>" in llava.tokenizer.decode(item.response_ids)


def test_an_image_that_cannot_be_used_is_a_refusal_that_says_why(llava, kind):
    """In the dialect's own form of errors. The episode goes on, and the refused call was not a turn."""

    async def agent(client, history):
        broken = file_of((90, 90))[:-4000]
        wide = asked(kind, (200, 200))
        await refused(client, [wide], "200 x 200 pixels, at most 30,000 are allowed (make it smaller")
        await refused(client, [asked(kind, broken)], "the image cannot be decoded")
        await refused(client, [asked(kind, b"no image")], "not of the formats")
        await refused(client, [asked(kind, "data:image/png;base64,!")], "is not base64")
        await refused(client, [asked(kind, SMALL, WIDE, HIGH)], "has 3 images, at most 2 are allowed")
        await refused(client, [asked(kind, "https://example.org/x.png")], "is an address (https://example.org/x.png)")
        await refused(client, [asked(kind, "./digits/0.png")], "with base64 in the request itself")
        history = [asked(kind, SMALL, WIDE)]
        reply = await client.ask(history)
        assert reply.turn == 0
        # The limit on images is that of the new ones.
        assert (await client.ask([*history, *reply.back, asked(kind, HIGH)])).turn == 1

    limits = ImageLimits(max_pixels=30_000, max_images=2)
    (item,) = items(play_agent(llava, kind, agent, limits=limits))
    assert gap(llava, item) < 1e-4


def test_images_of_refused_calls_are_bounded(llava, kind):
    """An episode keeps them, so an agent that repeats such calls would fill the memory."""

    async def agent(client, history):
        for number in range(5):
            await refused(client, [asked(kind, (20 + number, 20), b"no image")], "not of the formats")
        with pytest.raises(client.statuses["bad"]) as caught:
            await client.ask([asked(kind, (50, 20))])
        assert client.code(caught.value) == "images_used_up" and "has 6 images" in caught.value.message
        await client.ask(client.user("Hello"))

    (item,) = items(play_agent(llava, kind, agent, limits=ImageLimits(max_images=2), max_turns=2))
    assert len(item.columns["images_sizes"]) == 0


def test_an_address_of_an_allowed_host_is_downloaded_once(llava, kind):
    asked_for = []

    def fetch(url):
        asked_for.append(url)
        return file_of(SMALL)

    async def agent(client, history):
        history = [asked(kind, "https://example.org/x.png")]
        reply = await client.ask(history)
        await client.ask([*history, *reply.back, asked(kind, "And ", "https://example.org/x.png")])

    (item,) = items(play_agent(llava, kind, agent, fetch=fetch))
    assert set(asked_for) == {"https://example.org/x.png"} and len(asked_for) == 2  # read, then decoded
    assert gap(llava, item) < 1e-4 and len(item.columns["observed_sizes"]) == 1


def test_a_model_that_does_not_see_refuses_images_by_name(llava, kind):
    async def agent(client, history):
        await refused(client, [asked(kind, SMALL)], "the model does not see")
        await client.ask(client.user("Hello"))

    options = {"sight": None, "engine": Reworded(llava.tokenizer, ["Hm."]), "prompt": llava.prompt("Hello")}
    (item,) = items(play_agent(llava, kind, agent, **options))
    assert "Hm." in llava.tokenizer.decode(item.response_ids)
