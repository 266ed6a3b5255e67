"""The content of a reply with calls, in families that mark calls by special tokens."""

import pytest
from chat_templates import CHATML, byte_tokenizer
from reply_templates import reply_tokenizer

from rlhf_core.types import ToolCall
from rlhf_episodes.chat import ChatFormat

pytestmark = pytest.mark.usefixtures("one_parser")

SAID = "I will look."
GEMMA_CALL = "<|tool_call>call:add{a:1}<tool_call|>"
LFM_CALL = "<|tool_call_start|>[add(a=1)]<|tool_call_end|>"


def content(chat, tokenizer, reply):
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    return chat.content(ids, chat.tool_format().parse(reply))


@pytest.mark.parametrize(
    ("family", "call"),
    [("gemma4", GEMMA_CALL), ("gemma4-first", GEMMA_CALL), ("lfm2", LFM_CALL), ("lfm2-without-calls", LFM_CALL)],
)
def test_text_before_a_marked_call_is_the_content(family, call):
    tokenizer = reply_tokenizer(family)
    chat = ChatFormat(tokenizer)
    assert content(chat, tokenizer, f"{SAID}{call}") == SAID
    assert content(chat, tokenizer, call) == ""
    assert content(chat, tokenizer, SAID) == SAID


def test_the_whole_text_is_the_content_if_a_call_cannot_be_read():
    tokenizer = reply_tokenizer("lfm2")
    assert content(ChatFormat(tokenizer), tokenizer, f"{SAID}<|tool_call_start|>[add(a=") == f"{SAID}[add(a="


@pytest.mark.parametrize(
    ("form", "marker", "call"),
    [
        ("mistral", "[TOOL_CALLS]", '[{"name": "add", "arguments": {"a": 1}}]'),
        ("llama3", "<|python_tag|>", '{"name": "add", "parameters": {"a": 1}}'),
        ("hermes", "<tool_call>", '{"name": "add", "arguments": {"a": 1}}</tool_call>'),
    ],
)
@pytest.mark.parametrize("is_special", [True, False])
def test_a_thought_that_mentions_the_marker_is_part_of_the_content(form, marker, call, is_special):
    markers = (marker,) if is_special else ()
    tokenizer = byte_tokenizer(CHATML, ("<|im_start|>", "<|im_end|>", *markers), eos="<|im_end|>")
    chat = ChatFormat(tokenizer, tool_format=form)
    thought = f"<think>Use {marker}?</think>"
    shown = thought.replace(marker, "") if is_special else thought
    assert content(chat, tokenizer, f"{thought}{SAID}{marker}{call}") == f"{shown}{SAID}"
    assert content(chat, tokenizer, f"{thought}{marker}{call}") == shown


def test_few_prefixes_are_decoded_if_a_thought_repeats_the_marker(monkeypatch):
    tokenizer = reply_tokenizer("lfm2")
    chat = ChatFormat(tokenizer)
    thought = f"<think>{'<|tool_call_start|>' * 1000}</think>"
    ids = tokenizer(f"{thought}{SAID}{LFM_CALL}", add_special_tokens=False)["input_ids"]
    decode, decoded = tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(ids) or decode(ids, **options))
    assert chat.content(ids, (ToolCall(name="add", arguments={"a": 1}),)) == f"<think></think>{SAID}"
    assert len(decoded) < 20


def test_a_message_of_gpt_oss_before_its_call_is_the_content():
    tokenizer = reply_tokenizer("gpt-oss")
    call = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    reply = f"<|channel|>commentary<|message|>{SAID}<|end|><|start|>assistant{call}"
    assert content(ChatFormat(tokenizer), tokenizer, reply) == SAID
    assert ChatFormat(tokenizer).tool_format().parse(reply) == (ToolCall(name="add", arguments={"a": 1}),)
