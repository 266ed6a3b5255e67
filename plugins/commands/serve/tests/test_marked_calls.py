"""Calls that special tokens mark, in every dialect: the text before them is the reply's content."""

import gc

import pytest
from calling_agents import Speaks
from chat_templates import CHATML, byte_tokenizer
from dialect_clients import CLIENTS, Chat, client_of
from playing import driven, play
from reply_templates import reply_tokenizer

from rlhf_episodes import Outcome

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SAID = "I will look."
HARMONY = "<|channel|>commentary<|message|>{}<|end|><|start|>assistant<|channel|>commentary to=functions.add "
REPLIES = {
    "lfm2": SAID + "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>",
    "gemma4": SAID + "<|tool_call>call:add{a:1,b:2}<tool_call|>",
    "gpt-oss": HARMONY.format(SAID) + '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
    "mistral": SAID + '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "llama3": SAID + '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
}


def settings(family):
    """The tokenizer of a family, and the format of its calls."""
    markers = {"mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}
    if family not in markers:
        return reply_tokenizer(family), {}
    tokens = ("<|im_start|>", "<|im_end|>", markers[family])
    return byte_tokenizer(CHATML, tokens, eos="<|im_end|>"), {"tool_format": family}


@pytest.fixture(scope="module", autouse=True)
def parsers_are_collected():
    """End the processes of response parsers, which stop when the parsers are collected."""
    yield
    gc.collect()


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("lfm2", kind) for kind in CLIENTS), *((family, Chat) for family in REPLIES if family != "lfm2")],
)
@pytest.mark.slow_except("lfm2-Chat", "lfm2-Messages")
def test_the_text_before_a_marked_call_is_the_content_and_the_result_continues_the_row(family, kind):
    tokenizer, options = settings(family)

    async def run(task, policy):
        async with client_of(kind, await policy.endpoint()) as client:
            asked = client.user("1 and 2?")
            first = await client.ask(asked, tools=True)
            assert (first.text, first.calls, first.reason) == (SAID, [("add", {"a": 1, "b": 2})], "tools")
            await client.ask([*asked, *first.back, *client.result(first, "3")], tools=True)
        return Outcome()

    engine = Speaks(tokenizer, [REPLIES[family], "3"])
    options |= {"max_new_tokens": 200, "timeout_seconds": 60.0, "history": "append"}
    (episode,) = play(driven(run), tokenizer=tokenizer, engine=engine, **options)
    (row,) = episode.rows
    assert [turn.role for turn in row.turns] == ["policy", "environment", "policy"]
