"""Replies in a family's own form: calls are read, and a branch gets thoughts and answers in their places."""

from __future__ import annotations

import copy
import os

import pytest
from playing import branches
from reply_templates import HARMONY, reply_tokenizer

from rlhf_core.types import ToolCall
from rlhf_episodes.chat import ChatFormat
from rlhf_episodes.conversations import template_messages
from rlhf_episodes.endpoint import ChatMessage
from rlhf_episodes.response_parser import MAX_CHARS, ResponseParser, UnreadableReply

pytestmark = pytest.mark.usefixtures("one_parser")

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}},
    },
}
CALL = ToolCall(name="add", arguments={"a": 7, "text": "7"})
XML = "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=text>\n7\n</parameter>\n</function>\n"
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n<arg_key>text</arg_key>\n<arg_value>7</arg_value>"
)
GEMMA_CALL = '<|tool_call>call:add{a:7,text:<|"|>7<|"|>}<tool_call|>'
THOUGHT = "<|channel|>analysis<|message|>her<|end|><|start|>assistant"
CALLED = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("family", "whole", "cut"),
    [
        ("qwen3_5", f"hello\n{XML}</tool_call><|im_end|>", XML.partition("</function>")[0]),
        ("qwen3_5", f"{XML}</tool_call>", "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n"),
        ("nemotron_3", f"hello\n</think>\n{XML}</tool_call>\n<|im_end|>", f"</think>{XML.partition('</function>')[0]}"),
        (
            "gemma4",
            f"<|channel>thought\nno<channel|>hello{GEMMA_CALL}<|tool_response>",
            '<|tool_call>call:add{a:7,text:<|"|>',
        ),
        ("gemma4-first", f"hello\n{GEMMA_CALL}<turn|>\n", GEMMA_CALL.removesuffix("<tool_call|>")),
        ("glm4moe", f"<think>x</think>{GLM}\n</tool_call>", GLM),
        ("lfm2", "<|tool_call_start|>[add(a=7, text='7')]<|tool_call_end|><|im_end|>", "<|tool_call_start|>[add(a=7"),
        ("lfm2-without-calls", '<|tool_call_start|>[add(a=7, text="7")]<|tool_call_end|>', "<|tool_call_start|>[add("),
        (
            "gpt-oss",
            THOUGHT + CALLED + '{"a": 7, "text": "7"}<|call|>',
            f'{THOUGHT} to=functions.add<|channel|>commentary json<|message|>{{"a": 7, "te',
        ),
    ],
)
def test_calls_of_a_family_are_read_and_cut_ones_are_not_made(family, whole, cut):
    form = ChatFormat(reply_tokenizer(family)).tool_format()
    assert form.name == "qwen3_5" if family == "nemotron_3" else form.name in family
    assert form.parse(whole, [ADD]) == (CALL,)
    assert form.parse("hello", [ADD]) == ()
    (unmade,) = form.parse(cut, [ADD])
    assert unmade.name == "" and "could not be read" in unmade.error


def test_several_calls_in_a_list_and_values_of_json():
    form = ChatFormat(reply_tokenizer("lfm2")).tool_format()
    listed = "<|tool_call_start|>[add(a=1, text='), x'), add(a=true, b={\"c\": [null]})]<|tool_call_end|>"
    assert form.parse(listed) == (
        ToolCall(name="add", arguments={"a": 1, "text": "), x"}),
        ToolCall(name="add", arguments={"a": True, "b": {"c": [None]}}),
    )


@pytest.mark.parametrize("listed", ["[add(7)]", "[add(a=open('x'))]", "[" * 5000, "[add(a=9**9**9)]"])
def test_what_is_no_list_of_plain_calls_is_unreadable(listed):
    form = ChatFormat(reply_tokenizer("lfm2")).tool_format()
    (call,) = form.parse(f"<|tool_call_start|>{listed}<|tool_call_end|>")
    assert call.error is not None


@pytest.mark.slow
def test_a_text_that_takes_too_long_ends_its_process_and_the_next_reply_is_read():
    parser = ResponseParser(timeout_seconds=1.0)
    fields = {"content": {"content": "text"}, "slow": {"open_pattern": "(a|aa)+$", "content": "text"}}
    template = {"start_anchor": "x", "fields": fields}
    assert parser.message(template, "hello") == {"content": "hello"}
    process = parser._worker.pid
    with pytest.raises(UnreadableReply, match=r"not read within 1 s"):
        parser.message(template, "a" * 200 + "b")
    assert not os.path.exists(f"/proc/{process}")
    assert ResponseParser.message(ResponseParser(), template, "hello") == {"content": "hello"}
    with pytest.raises(UnreadableReply, match="more than"):
        parser.message(template, "a" * (MAX_CHARS + 1))


FINAL = "<|channel|>final<|message|>he<|return|>"


def test_a_branch_of_gpt_oss_has_the_answer_in_the_final_channel_and_no_thought():
    _, second = branches(reply_tokenizer("gpt-oss"), [THOUGHT + FINAL, FINAL], [None, "on"])
    assert second.prompt.endswith(
        "<|start|>user<|message|>hello<|end|><|start|>assistant<|channel|>final<|message|>he<|end|>"
        "<|start|>user<|message|>on<|end|><|start|>assistant"
    )


def test_a_row_of_gpt_oss_that_grows_has_one_end_after_a_reply():
    tokenizer = reply_tokenizer("gpt-oss")
    (row,) = branches(tokenizer, [THOUGHT + FINAL, FINAL], [None, "on"], history="append")
    text = tokenizer.decode(row.completion_ids)
    assert text == f"{THOUGHT}{FINAL}<|start|>user<|message|>on<|end|><|start|>assistant{FINAL}"


def test_a_cut_reply_of_gpt_oss_is_given_its_end():
    tokenizer = reply_tokenizer("gpt-oss")
    (row,) = branches(tokenizer, ["<|channel|>final<|message|>he", FINAL], [None, "on"], history="append")
    assert "<|message|>he<|end|><|start|>user" in tokenizer.decode(row.completion_ids)


def test_a_call_in_a_branch_of_gpt_oss_is_written_as_a_call():
    chat = ChatFormat(reply_tokenizer("gpt-oss"))
    ids = reply_tokenizer("gpt-oss")(THOUGHT + CALLED + '{"a": 7}<|call|>', add_special_tokens=False)["input_ids"]
    message = chat.reply_message(ids)
    assert message["thinking"] == "her" and message["content"] == ""
    text, _ = chat.open([{"role": "user", "content": "hello"}, message, {"role": "user", "content": "7"}])
    written = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 7}<|call|><|start|>user'
    assert written in text


@pytest.mark.parametrize(
    ("family", "called"),
    [
        ("qwen3_5", f"hello\n{XML}</tool_call>"),
        ("nemotron_3", f"<think>\nher\n</think>\n{XML}</tool_call>"),
        ("glm4moe", f"{GLM}\n</tool_call>"),
        ("lfm2", "<|tool_call_start|>[add(a=7, text='7')]<|tool_call_end|>"),
        ("gpt-oss", THOUGHT + ' to=functions.add<|channel|>commentary json<|message|>{"a": 7, "text": "7"}<|call|>'),
        ("gemma4", f"<|channel>thought\nher\n<channel|>{GEMMA_CALL}"),
        ("gemma4-first", GEMMA_CALL),
    ],
)
def test_a_call_of_a_family_is_in_a_branch_as_it_was_sampled(family, called):
    tokenizer = reply_tokenizer(family)
    chat = ChatFormat(tokenizer)
    ids = tokenizer(called, add_special_tokens=False)["input_ids"]
    text, _ = chat.open([USER, chat.reply_message(ids), RESULT], [ADD])
    assert called in text and text.count(called[-30:]) == 1


USER = {"role": "user", "content": "hello"}
RESULT = {"role": "tool", "name": "add", "content": "7"}
GIVEN = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant'


@pytest.mark.parametrize(("end", "between"), [("<|call|>", ""), ("}", "<|call|>")])
def test_a_result_follows_its_call_in_gpt_oss(end, between):
    tokenizer = reply_tokenizer("gpt-oss")
    chat = ChatFormat(tokenizer, eos_token_ids=tokenizer.convert_tokens_to_ids(["<|call|>"]))
    sampled = tokenizer.convert_tokens_to_ids(["h", end])
    assert tokenizer.decode(chat.after_reply([RESULT], tools=[ADD], sampled_ids=sampled)) == between + GIVEN
    call = tokenizer(CALLED + '{"a": 7}<|call|>', add_special_tokens=False)["input_ids"]
    text, _ = chat.open([{"role": "user", "content": "hello"}, chat.reply_message(call), RESULT], [ADD])
    assert text.endswith('<|message|>{"a": 7}<|call|>' + GIVEN)


REFUSES = """
{%- for message in messages %}
    {%- set before = messages[loop.index0 - 1] %}
    {%- if message.role == 'tool' and before.role == 'assistant' and not before.tool_calls %}
        {{- raise_exception('there was no call before') }}
    {%- endif %}
{%- endfor %}
"""


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_a_result_follows_its_call_in_any_form_if_the_template_refuses_it_elsewhere(family):
    tokenizer = copy.copy(reply_tokenizer(family))
    tokenizer.chat_template = REFUSES + str(tokenizer.chat_template)
    ids = ChatFormat(tokenizer).after_reply([RESULT, RESULT], tools=[ADD], sampled_ids=[tokenizer.eos_token_id])
    given = "<|im_start|>tool\n7<|im_end|>\n"
    assert tokenizer.decode(ids) == f"\n{given}{given}<|im_start|>assistant\n"


def test_a_reply_with_a_call_that_is_not_an_object_keeps_its_text():
    tokenizer = reply_tokenizer("gpt-oss")
    chat = ChatFormat(tokenizer)
    wrong = CALLED + "[7]<|call|>"
    (call,) = chat.tool_format().parse(wrong, [ADD])
    assert call.error is not None
    assert "[7]" in chat.reply_message(tokenizer(wrong, add_special_tokens=False)["input_ids"])["content"]


SPACED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}{{- call.function.arguments.text + '\\n' }}{% endfor %}
    {{- '\\n<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def test_the_closing_of_a_call_is_not_taken_from_a_reply_that_begins_its_own_closing_with_it():
    tokenizer = copy.copy(reply_tokenizer("qwen3_5"))
    tokenizer.chat_template = SPACED
    cut = tokenizer("h", add_special_tokens=False)["input_ids"]
    ids = ChatFormat(tokenizer).after_reply([USER], sampled_ids=cut)
    assert tokenizer.decode(ids) == "\n<|im_end|><|im_start|>user\nhello\n<|im_end|><|im_start|>assistant\n"


def test_what_is_wrong_with_a_call_is_told_to_gpt_oss_as_by_a_user():
    tokenizer = reply_tokenizer("gpt-oss")
    wrong = {"role": "tool", "name": "", "content": "error: no"}
    ids = ChatFormat(tokenizer).after_reply([wrong], tools=[ADD], sampled_ids=[tokenizer.eos_token_id])
    assert tokenizer.decode(ids).startswith("<|start|>user<|message|><tool_response>\nerror: no\n</tool_response>")


def test_a_tokenizers_own_response_template_comes_first():
    tokenizer = copy.copy(reply_tokenizer("qwen3_5"))
    tokenizer.chat_template = HARMONY.replace("to=functions.", "calls ").replace("commentary json", "own")
    assert ChatFormat(tokenizer).check() is not None
    tokenizer.response_template = {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "tool_calls": {
                "open_pattern": r" calls (?P<name>\w+)<\|channel\|>own<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    }
    form = ChatFormat(tokenizer).tool_format()
    assert form.parse(' calls add<|channel|>own<|message|>{"a": 7}<|call|>') == (
        ToolCall(name="add", arguments={"a": 7}),
    )


def test_calls_that_only_the_template_writes_reach_it_as_calls():
    chat = ChatFormat(reply_tokenizer("qwen3_5"))
    asked = ChatMessage(role="assistant", content="hello", tool_calls=(CALL,), call_ids=("1",))
    (message,) = template_messages([asked], chat.tool_format)
    text, _ = chat.open([{"role": "user", "content": "hello"}, message, {"role": "user", "content": "on"}], [ADD])
    assert f"<|im_start|>assistant\nhello{XML}</tool_call><|im_end|>" in text


def test_values_of_gemma4_are_read_with_their_types():
    form = ChatFormat(reply_tokenizer("gemma4")).tool_format()
    written = '{list:[1,<|"|>b: {c}<|"|>],nested:{key:<|"|>x<|"|>,other:true},none:null,text:<|"|>say "hi"<|"|>}'
    arguments = {
        "list": [1, "b: {c}"],
        "nested": {"key": "x", "other": True},
        "none": None,
        "text": 'say "hi"',
    }
    expected = (ToolCall(name="a.b", arguments=arguments), ToolCall(name="add", arguments={}))
    assert form.parse(f"<|tool_call>call:a.b{written}<tool_call|>\n<|tool_call>call:add{{}}<tool_call|>") == expected
    (wrong,) = form.parse("<|tool_call>call:add{a:}<tool_call|>")
    assert wrong.error is not None


@pytest.mark.parametrize("end", ["<tool_call|>", "<|tool_response>"])
def test_results_follow_their_calls_in_gemma4_each_under_its_name(end):
    tokenizer = reply_tokenizer("gemma4")
    chat = ChatFormat(tokenizer, eos_token_ids=tokenizer.convert_tokens_to_ids(["<|tool_response>"]))
    results = [RESULT, {"role": "tool", "name": "other", "content": "8"}]
    given = tokenizer.decode(
        chat.after_reply(results, tools=[ADD], sampled_ids=tokenizer.convert_tokens_to_ids(["h", end]))
    )
    written = (
        '<|tool_response>response:add{value:<|"|>7<|"|>}<tool_response|>'
        '<|tool_response>response:other{value:<|"|>8<|"|>}<tool_response|>'
    )
    assert given == (written if end == "<tool_call|>" else written.removeprefix("<|tool_response>"))


def test_a_thought_before_a_call_of_gemma4_is_kept_until_the_user_speaks():
    tokenizer = reply_tokenizer("gemma4")
    chat = ChatFormat(tokenizer)
    reply = f"<|channel>thought\nher<channel|>hello{GEMMA_CALL}<|tool_response>"
    called = chat.reply_message(tokenizer(reply, add_special_tokens=False)["input_ids"])
    assert called["content"] == "", "the template would write it after the result, as the answer"
    text, _ = chat.open([USER, called, RESULT], [ADD])
    result = '<|tool_response>response:add{value:<|"|>7<|"|>}<tool_response|>'
    assert text.endswith(f"<|turn>model\n<|channel>thought\nher\n<channel|>{GEMMA_CALL}{result}")
    answered = {"role": "assistant", "content": "he"}
    text, _ = chat.open([USER, called, RESULT, answered, {"role": "user", "content": "on"}], [ADD])
    assert text.endswith(f"<|turn>model\n{GEMMA_CALL}{result}he<turn|>\n<|turn>user\non<turn|>\n<|turn>model\n")


def test_a_branch_of_gemma4_starts_where_the_user_speaks_after_a_thought():
    replies = [f"<|channel>thought\nher<channel|>{GEMMA_CALL}<|tool_response>", "he<turn|>", "hello<turn|>"]
    found = branches(reply_tokenizer("gemma4"), replies, [None, [RESULT], "on"])
    assert len(found) > 1 and "her" not in found[-1].prompt
    assert found[-1].prompt.endswith("he<turn|>\n<|turn>user\non<turn|>\n<|turn>model\n")
