"""Calls of tools in a model's text, which may be anything."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.types import ToolCall
from rlhf_episodes.tool_calls import FORMATS, MAX_CALLS, recognise
from rlhf_web.untrusted_json import MAX_CHARS, MAX_DEPTH

HERMES, LLAMA3, MISTRAL = FORMATS["hermes"], FORMATS["llama3"], FORMATS["mistral"]
ADD = ToolCall(name="add", arguments={"a": 1})
NOW = ToolCall(name="now")


def calls(form, text):
    """Name and arguments of each call, or its error without the beginning they all share."""
    return [
        (call.name, dict(call.arguments))
        if call.error is None
        else call.error.removeprefix("The tool call could not be read: ").removesuffix(".")
        for call in form.parse(text)
    ]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (HERMES, 'Let me see.\n<tool_call>{"arguments": "{\\"a\\": 1}", "name": "add"}</tool_call> Done.'),
        (HERMES, '<think>\n<tool_call>no</tool_call>\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}<|im_end|>'),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1}}'),
        (LLAMA3, '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}<|eom_id|>'),
        (LLAMA3, ' \n{"name": "add", "arguments": {"a": 1}}\n'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "call00000"}]</s>'),
        (MISTRAL, '[{"name": "add", "arguments": {"a": 1}}]'),
    ],
)
def test_a_call_is_read(form, text):
    assert form.parse(text) == (ADD,)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            HERMES,
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        ),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": null}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]'),
    ],
)
def test_several_calls_keep_their_order(form, text):
    assert form.parse(text) == (ADD, NOW)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "text", ["", "2 + 2 is 4", '{"answer": 4}', "[1, 2]", "{", "<think>\nadd, then", "```json\n{}```"]
)
def test_text_without_a_call_is_no_call(form, text):
    assert form.parse(text) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("add(1)", "it is not valid JSON: Expecting value at character 0"),
        ('{"name": "add", "arguments": {"a": 1}', "it is not valid JSON: Expecting ',' delimiter at character 37"),
        ('{"name": "add"} and more', "there is more text after the JSON value, at character 15"),
        ("[]", 'a call is a JSON object with "name" and "arguments"'),
        ('{"arguments": {}}', '"name" has to be the name of a function'),
        ('{"name": 5}', '"name" has to be the name of a function'),
        ('{"name": "' + "x" * 1000 + '"}', '"name" has to be the name of a function'),
        ('{"name": "add", "arguments": [1]}', '"arguments" of add have to be a JSON object'),
        (
            '{"name": "add", "arguments": "1 2"}',
            '"arguments" of add: there is more text after the JSON value, at character 1',
        ),
        ('{"name": "add", "name": "now"}', "the key 'name' occurs twice"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not a JSON number"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is not a JSON number"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "the number 1e999 is too large"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "a number has more than 300 digits"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "it has half of a surrogate pair, which is not text"),
        ('{"name": "\ud800"}', "it has half of a surrogate pair, which is not text"),
        ('{"name": "add", "arguments": ' + "[" * 100_0 + "}", f"it is nested more than {MAX_DEPTH} deep"),
        ('{"name": "' + "x" * MAX_CHARS, f"it is longer than {MAX_CHARS} characters"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text, reason):
    assert calls(HERMES, f"<tool_call>{text}</tool_call>") == [reason]


def test_a_call_that_is_not_closed():
    assert calls(HERMES, '<tool_call>{"name": "add"') == ["</tool_call> is missing"]
    assert calls(LLAMA3, '{"name": "add", "parameters": {') == [
        "it is not valid JSON: Expecting property name enclosed in double quotes at character 31"
    ]
    assert calls(LLAMA3, "<|python_tag|>print(1)") == ["no JSON object follows <|python_tag|>"]


def test_a_call_that_cannot_be_read_leaves_the_others():
    text = '<tool_call>{</tool_call><tool_call>{"name": "now"}</tool_call>'
    assert [call.name for call in HERMES.parse(text)] == ["", "now"]


def test_calls_beyond_the_bound_are_left_out_with_a_word():
    many = '<tool_call>{"name": "now"}</tool_call>' * 10_000
    for form, text in ((HERMES, many), (LLAMA3, '{"name": "now"};' * 1000), (MISTRAL, '[{"name": "now"}]' * 1000)):
        found = form.parse(text)
        assert found[:MAX_CALLS] == (NOW,) * MAX_CALLS and len(found) == MAX_CALLS + 1
        assert found[-1].error is not None and f"only the first {MAX_CALLS} calls" in found[-1].error


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "{",
        '{"a":',
        '"',
        '\\"',
        '"\\',
        "<tool_call>",
        "</think>",
        "<think>",
        '[{"name":',
        "[]",
        "[] ",
        "1",
        "1e",
        ";",
        " ",
    ],
)
def test_long_hostile_text_ends_soon(form, piece):
    """Quadratic time over a million characters would run into the test's own limit."""
    for start in ("", "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", '{"name":', '[{"name":'):
        assert len(form.parse(start + piece * (1_000_000 // len(piece)))) <= MAX_CALLS + 1


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>", '{"name":', '"arguments":',
     "{", "}", "[", "]", '"', "\\", ",", ":", "1", "-", "NaN", "1e400", "\ud800", "\\ud800", "null", " ", "\n", ";"]
)  # fmt: skip


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join)))
def test_whatever_a_model_writes_is_read_without_an_error(form, text):
    for call in form.parse(text):
        assert (call.name == "") == (call.error is not None)
        json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode()


UNICODE = st.text(st.characters(codec="utf-8"))
ARGUMENTS = st.dictionaries(
    UNICODE,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | UNICODE,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(UNICODE, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(arguments=ARGUMENTS, ascii_only=st.booleans())
def test_a_call_that_is_written_is_read(arguments, ascii_only):
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    if any(tag in written for tag in ("tool_call>", "think>", "THINK]", "<|python_tag|>", "[TOOL_CALLS]")):
        return
    call = ToolCall(name="add", arguments=arguments)
    assert HERMES.parse(f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>') == (call,)
    assert LLAMA3.parse(f'{{"name": "add", "parameters": {written}}}') == (call,)
    assert MISTRAL.parse(f'[TOOL_CALLS][{{"name": "add", "arguments": {written}}}]') == (call,)


def test_a_format_is_recognised_by_a_call_in_it():
    assert (
        recognise('<|im_start|><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>', ADD) is HERMES
    )
    assert recognise('{"name": "add", "parameters": {"a": 1}}<|eot_id|>', ADD) is LLAMA3
    assert recognise('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]</s>', ADD) is MISTRAL
    assert recognise("<function=add><parameter=a>1</parameter></function>", ADD) is None


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_description_lists_the_tools_and_the_form(form):
    tool = {"type": "function", "function": {"name": "café", "parameters": {}}}
    text = form.describe([tool])
    assert json.dumps(tool, ensure_ascii=False) in text and text.endswith(form.example)
    example = form.example.replace("<function-name>", '"add"').replace("<arguments-object>", '{"a": 1}')
    assert form.parse(example) == (ADD,)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("made", [(ADD,), (NOW, ADD, ADD)], ids=len)
def test_calls_that_are_written_are_read(form, made):
    written = form.write("", made)
    assert form.parse(written) == made
    assert form.content(written, made) == ""
    assert form.write("No.", ()) == "No."


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Let me see.\n" + HERMES.write("", [ADD]), "Let me see.\n"),
        ("<think>\n<tool_call>\n</think>\n\nSo." + HERMES.write("", [ADD]), "<think>\n<tool_call>\n</think>\n\nSo."),
        (HERMES.write("Both.", [ADD]) + "<tool_call>{</tool_call>", None),
        ("No call at all.", None),
    ],
)
def test_what_is_said_before_calls_is_told_apart(text, content):
    assert HERMES.content(text, HERMES.parse(text)) == (text if content is None else content)
