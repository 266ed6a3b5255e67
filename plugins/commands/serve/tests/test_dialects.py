"""The same conversations in every dialect: equal rows, and masks that are those of a slow reference."""

from dataclasses import dataclass
from functools import cache

import pytest
from calling_agents import CALL, TOKENIZER, Speaks
from dialect_clients import CLIENTS, ChainedResponses, Chat, Messages, Responses, client_of
from playing import driven, play
from slow_masks import check_masks

from rlhf_episodes import Outcome

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Recorded(Speaks):
    """Keeps each request with its answer."""

    def __init__(self, texts):
        super().__init__(TOKENIZER, texts)
        self.turns = []

    def generate(self, requests, sampling):
        by_place = {(each.sample_id, each.branch): each for each in requests}
        for each in super().generate(requests, sampling):
            self.turns.append((by_place[each.sample_id, each.branch], each.token_ids))
            yield each


@dataclass
class Situation:
    """What an agent does, and what the policy says."""

    run: object
    texts: tuple[str, ...] = ("hello", "tin in er")
    options: tuple[tuple[str, object], ...] = ()


async def plain(client):
    first = await client.ask(client.user("hello"), system="Be brief.")
    assert (first.text, first.reason, first.calls, first.turn) == ("hello", "stop", [], 0)
    second = await client.ask([*client.user("hello"), *first.back, *client.user("and?")], system="Be brief.")
    assert (second.text, second.turn) == ("tin in er", 1)
    assert second.num_tokens[0] > sum(first.num_tokens)


async def tools(client, stream=False):
    asked = client.user("1 and 2?")
    first = await client.ask(asked, tools=True, stream=stream)
    assert (first.text, first.calls, first.reason) == ("Let me see.\n", [("add", {"a": 1, "b": 2})], "tools")
    told = [*asked, *first.back, *client.result(first, "3")]
    second = await client.ask(told, tools=True, stream=stream)
    assert (second.text, second.calls, second.reason) == ("3", [], "stop")


async def streamed(client):
    await tools(client, stream=True)


async def branch(client):
    asked = client.user("hello")
    first = await client.ask(asked)
    await client.ask([*asked, *client.edited("no"), *client.user("and?")])
    await client.ask([*asked, *first.back, *client.user("one")])
    await client.ask([*asked, *first.back, *client.user("two")])


async def refused(client):
    for change in ({"temperature": "hot"}, {"top_k": 5}, {"tool_choice": {"type": "any"}}):
        option = {"extra_body": change}
        with pytest.raises(client.statuses["bad"], match=next(iter(change))) as caught:
            await client.ask(client.user("hello"), **option)
        assert client.code(caught.value) in ("invalid_request", "unsupported_parameter")
    with pytest.raises(client.statuses["bad"], match="image|source"):
        await client.ask([{"role": "user", "content": [{"type": "image", "source": {}}]}])
    found = await client.ask(client.user("hello"))
    assert found.turn == 0, "a refused call costs no turn"


async def long(client):
    cut = await client.ask(client.user("hello"), max_tokens=1)
    assert (cut.reason, cut.num_tokens[1]) == ("length", 1)
    history = [*client.user("hello"), *cut.back, *client.user("more")]
    with pytest.raises(client.statuses["bad"]) as caught:
        while True:
            history += [*(await client.ask(history)).back, *client.user("more")]
    assert client.code(caught.value) == "context_length_exceeded"


async def often(client):
    await client.ask(client.user("hello"))
    with pytest.raises(client.statuses["bad"]) as caught:
        while True:
            await client.ask(client.user("hello"))
    assert client.code(caught.value) == "turns_used_up"


SITUATIONS = {
    "plain": Situation(plain),
    "tools": Situation(tools, (f"Let me see.\n{CALL}", "3")),
    "stream": Situation(streamed, (f"Let me see.\n{CALL}", "3")),
    "branch": Situation(branch, ("hello", "tin", "in", "er")),
    "error": Situation(refused),
    "limit of tokens": Situation(long, ("hello",), (("context_tokens", 100), ("max_turns", 50))),
    "limit of turns": Situation(often, ("hello",), (("max_turns", 3),)),
}


@cache
def played(name, kind):
    """The episode of a situation, and its engine."""
    situation = SITUATIONS[name]
    engine = Recorded(situation.texts)

    async def run(task, policy):
        async with client_of(kind, await policy.endpoint()) as client:
            await situation.run(client)
        return Outcome()

    options = {"max_new_tokens": 200, "timeout_seconds": 60.0, **dict(situation.options)}
    (episode,) = play(driven(run), tokenizer=TOKENIZER, engine=engine, **options)
    return episode, engine


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("name", SITUATIONS)
def test_rows_do_not_depend_on_the_dialect_and_masks_are_those_of_a_slow_reference(name, kind):
    episode, engine = played(name, kind)
    check_masks(episode, engine)
    chat, _ = played(name, Chat)
    assert [(row.sequence, row.mask, row.branch) for row in episode.rows] == [
        (row.sequence, row.mask, row.branch) for row in chat.rows
    ]
    assert [row.tools for row in episode.rows] == [row.tools for row in chat.rows]


def agent(function, texts=("hello",), **options):
    """The episode of an agent `async function(endpoint, policy)`, and its engine."""
    engine = Recorded(texts)

    async def run(task, policy):
        await function(await policy.endpoint(), policy)
        return Outcome()

    options = {"max_new_tokens": 200, "timeout_seconds": 60.0, **options}
    (episode,) = play(driven(run), tokenizer=TOKENIZER, engine=engine, **options)
    return episode, engine


def test_a_conversation_that_changes_its_dialect_is_one_row():
    async def run(endpoint, policy):
        given, texts = [], []
        for kind in (Chat, Messages, Responses, Messages, Chat):
            async with client_of(kind, endpoint) as client:
                history = []
                for question, answer in zip(given, texts, strict=True):
                    history += [*client.user(question), *client.edited(answer)]
                given.append(f"question {len(given)}")
                texts.append((await client.ask([*history, *client.user(given[-1])], system="Be brief.")).text)

    episode, engine = agent(run, ("hello", "tin", "in", "er", "ll"))
    (row,) = episode.rows
    assert len(engine.turns) == 5
    check_masks(episode, engine)
    assert row.sequence == engine.turns[-1][0].prompt_ids + engine.turns[-1][1]


@pytest.mark.parametrize("kind", [Messages, Responses, ChainedResponses])
def test_tokens_are_counted_without_a_turn(kind):
    async def run(endpoint, policy):
        async with client_of(kind, endpoint) as client:
            asked, options = client.user("1 and 2?"), {"system": "Be brief.", "tools": True}
            counted = await client.count(asked, **options)
            first = await client.ask(asked, **options)
            told = [*asked, *first.back, *client.result(first, "3")]
            again = [await client.count(told, **options) for _ in range(2)]
            second = await client.ask(told, **options)
            assert (counted, again) == (first.num_tokens[0], [second.num_tokens[0]] * 2)
            assert policy.remaining_turns == 6

    episode, engine = agent(run, (CALL, "3"), max_turns=8)
    assert len(episode.rows) == 1
    check_masks(episode, engine)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_wrong_key_is_refused_in_the_form_of_the_dialect(kind):
    async def run(endpoint, policy):
        async with client_of(kind, endpoint, api_key="guess") as client:
            with pytest.raises(client.statuses["key"]) as caught:
                await client.ask(client.user("hello"))
            assert client.code(caught.value) == "invalid_api_key"
        async with client_of(kind, endpoint) as client:
            await client.ask(client.user("hello"))

    agent(run)


def test_counts_of_an_episode_are_limited():
    async def run(endpoint, policy):
        async with client_of(Messages, endpoint) as client:
            for _ in range(16):
                await client.count(client.user("hello"))
            with pytest.raises(client.statuses["bad"]) as caught:
                await client.count(client.user("hello"))
            assert client.code(caught.value) == "counts_used_up"
            assert policy.remaining_turns == 1
            await client.ask(client.user("hello"))

    agent(run, max_turns=1)


def test_an_unknown_response_is_named():
    async def run(endpoint, policy):
        async with client_of(ChainedResponses, endpoint) as client:
            first = await client.ask(client.user("hello"), store=False)
            with pytest.raises(client.statuses["bad"], match="is not stored: send the whole conversation") as caught:
                await client.ask([*first.back, *client.user("and?")])
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")

    agent(run)
