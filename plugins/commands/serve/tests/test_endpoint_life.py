"""An endpoint's bounds, refusals and end."""

import asyncio
import socket
import threading

import openai
import pytest
from calling_agents import (
    TOKENIZER,
    USER,
    Speaks,
    agent,
    ask,
    client_of,
    episodes,
    said,
    speaker,
)
from playing import driven, play, play_one
from running import PATIENCE_SECONDS

from rlhf_core.errors import EpisodeError, PluginError
from rlhf_episodes import Outcome
from rlhf_testing.models import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_one_server_serves_every_episode_each_by_its_own_key():
    seen = {}

    async def run(task, policy):
        endpoint = await policy.endpoint()
        assert endpoint == await policy.endpoint() and endpoint.api_key not in repr(endpoint)
        seen[task.sample_id] = endpoint
        async with client_of(policy) as client:
            await ask(client, [USER])
        return Outcome()

    played = play(driven(run), samples=3, tokenizer=TOKENIZER, engine=speaker(), max_new_tokens=8)
    assert len({endpoint.base_url for endpoint in seen.values()}) == 1
    assert len({endpoint.api_key for endpoint in seen.values()}) == 3
    assert [len(each.rows) for each in played] == [1, 1, 1]
    port = int(seen[0].base_url.split(":")[2].split("/")[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize("earlier", [0, 1], ids=["the first call", "a later one"])
def test_a_call_that_its_client_gave_up_may_be_made_again(earlier):
    """It leaves no branch and costs no turn."""
    inside, go_on = threading.Event(), threading.Event()

    class Waits(Speaks):
        def generate(self, requests, sampling):
            if len(self.stops) == earlier:
                inside.set()
                assert go_on.wait(PATIENCE_SECONDS)
            yield from super().generate(requests, sampling)

    async def run(client, task, policy):
        messages = [USER]
        for _ in range(earlier):
            messages += [said(await ask(client, messages)), USER]
        given_up = asyncio.create_task(ask(client, messages))
        while not inside.is_set():
            await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.wait([given_up])
        while policy.remaining_turns < 8 - earlier:
            await asyncio.sleep(0.01)
        go_on.set()
        await ask(client, messages)

    (played,) = episodes(run, engine=Waits(TOKENIZER, ["hello"]))
    (row,) = played.rows
    assert (row.branch, played.rows[0].columns["environment"]["num_turns"]) == (0, 1 + earlier)
    assert [turn.role for turn in row.turns] == ["policy", "environment", "policy"][: 1 + 2 * earlier]


def test_a_bound_is_told_and_the_episode_is_truncated():
    async def turns(client, task, policy):
        while True:
            await ask(client, [USER])

    (played,) = episodes(turns, max_turns=2)
    assert (
        played.rows[0].columns["environment"]["truncated"],
        played.rows[0].columns["environment"]["failed"],
        len(played.rows),
    ) == (1.0, 0.0, 2)

    codes = []

    async def tokens(client, task, policy):
        messages = [USER]
        try:
            while True:
                messages += [said(await ask(client, messages)), USER]
        except openai.BadRequestError as error:
            codes.append((error.code, error.status_code))

    (played,) = episodes(tokens, context_tokens=100, max_turns=50)
    assert codes == [("context_length_exceeded", 400)]
    assert played.rows[0].columns["environment"]["truncated"] == 0.0, "the environment went on and said done"
    assert len(played.rows) == 1 and played.rows[0].turns[-1].role == "policy"


def test_what_an_agent_raises_by_itself_fails_the_episode():
    async def run(client, task, policy):
        await ask(client, [USER])
        raise ValueError("lost its way")

    with pytest.raises(EpisodeError, match="lost its way"):
        episodes(run)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "messages: .* at least 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content: must be"),
        ({"messages": [USER], "n": 2}, "n is not supported"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "does not sample structured answers"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "tools": [{"type": "web"}]}, "tools"),
        ({"messages": [USER], "temperature": "hot"}, "temperature"),
        ({"messages": [USER], "stop": [1]}, "stop"),
    ],
    ids=str,
)
def test_a_bad_body_is_told_what_is_wrong_and_costs_no_turn(body, says):
    async def run(client, task, policy):
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            await client.post("/chat/completions", body=body, cast_to=object)
        assert caught.value.type == "invalid_request_error"
        assert policy.remaining_turns == 8
        await ask(client, [USER])

    (played,) = episodes(run)
    assert len(played.rows) == 1


def test_a_model_without_a_chat_template_is_asked_for_text_only():
    async def run(client, task, policy):
        with pytest.raises(openai.BadRequestError, match="chat messages"):
            await ask(client, [USER])
        await client.completions.create(model="policy", prompt="31>")

    played = play_one(agent(run), tokenizer=tiny_tokenizer())
    assert [row.prompt_ids for row in played.rows] == [(7, 5, 14)]


def test_after_its_end_an_episode_is_not_answered():
    kept = []

    async def run(task, policy):
        endpoint = await policy.endpoint()
        kept.append((endpoint, policy))
        if len(kept) == 1:
            async with client_of(policy) as client:
                await ask(client, [USER])
            return Outcome()
        while not ended(kept[0][1]):
            await asyncio.sleep(0.01)
        first = kept[0][0]
        async with openai.AsyncOpenAI(base_url=first.base_url, api_key=first.api_key, max_retries=0) as late:
            with pytest.raises(openai.AuthenticationError):
                await ask(late, [USER])
        with pytest.raises(RuntimeError, match="the episode is over"):
            await kept[0][1].endpoint()
        async with client_of(policy) as client:
            await ask(client, [USER])
        return Outcome(reward=1.0)

    played = play(driven(run), samples=2, tokenizer=TOKENIZER, max_new_tokens=8, concurrency=2, engine=speaker())
    assert sorted(each.reward for each in played) == [0.0, 1.0]


def ended(policy):
    return policy._episode.is_over


def test_without_a_server_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr("rlhf_core.plugins.discovery._installed", dict)

    async def run(client, task, policy):
        raise AssertionError("unreachable")

    with pytest.raises(PluginError, match=r"(?s)policy\.endpoint\(\): no endpoint server .*pip install rlhf-serve"):
        episodes(run)
