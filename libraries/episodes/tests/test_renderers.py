"""Probed chat templates, compared with the package `renderers` over the families that it contains.

A tokenizer's template is that of TRL's wheel or, for families that TRL lacks, the renderer itself. Tokenizers are made
here, with the tokens that the renderer requires.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from functools import lru_cache
from typing import Any

import pytest
from chat_templates import byte_tokenizer
from playing import branches

from rlhf_core.errors import ConfigError
from rlhf_core.prompts.encoder import Refusal, render_chat
from rlhf_core.types import ToolCall
from rlhf_episodes.chat import ChatFormat
from rlhf_episodes.renderer_parser import MarkerTokenizer

pytest.importorskip("renderers", reason="needs rlhf-episodes[renderers]")
from renderers import config_from_name, create_renderer
from renderers.base import MODEL_RENDERER_MAP

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "text": {"type": "string"}, "of": {"type": "array"}},
    "required": ["a"],
}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
CALL = ToolCall(name="add", arguments={"a": 7, "text": 'say "hé",\nthen 7', "of": [1, {"b": None}]})
SYSTEM = {"role": "system", "content": "Be brief."}
USER, ON = {"role": "user", "content": "Hello"}, {"role": "user", "content": "On"}
YES = {"role": "assistant", "content": "Yes"}
THOUGHT = {**YES, "reasoning_content": "Hm"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": dict(CALL.arguments)}}
    ],
}
RESULT = {"role": "tool", "content": "14", "tool_call_id": "call00001", "name": "add"}
CONVERSATIONS = {
    "plain": ([USER], []),
    "system": ([SYSTEM, USER], []),
    "several-turns": ([USER, YES, ON], []),
    "thought": ([USER, THOUGHT, ON], []),
    "tools": ([SYSTEM, USER], [ADD]),
    "call": ([USER, CALLED], [ADD]),
    "result": ([USER, CALLED, RESULT], [ADD]),
    "thought-and-call": ([USER, {**CALLED, "reasoning_content": "Hm"}, RESULT], [ADD]),
}
TEMPLATES = {
    "deepseekv3": "deepseek-r1",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm-4.5",
    "llama3_1": "llama-3",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "nemotron_3_5_lightning": "nemotron-3.5",
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3-vl",
    "qwen3_vl": "qwen3-vl",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
}
"""Templates in TRL's wheel, and their renderers."""
NAMES = sorted(set(MODEL_RENDERER_MAP.values()) - {"gpt-oss", "deepseek-v4"})
"""gpt-oss downloads its vocabulary, and DeepSeek-V4 has no chat template."""
READ_BY_RENDERER = {"minimax-m2", "hy3", "inkling"}
UNREAD = {"kimi-k2", "kimi-k2.5"}
"""A call contains the name of its tool only in its id."""

LACKS_NEWLINE = {"laguna-xs.2", "laguna-m.1"}
"""Continuing a row, the renderer omits a newline that it writes when it renders the whole conversation."""


class AnyToken(MarkerTokenizer):
    """Has each token that a renderer requires, and collects them."""

    def __init__(self) -> None:
        super().__init__(["<|endoftext|>"], eos="<|endoftext|>")
        self.required = {"<|endoftext|>"}

    def encode(self, text: str, **options: Any) -> list[int]:
        return [self.convert_tokens_to_ids(text)] if re.fullmatch(r"<｜[^｜]+｜>", text) else super().encode(text)

    def convert_tokens_to_ids(self, token: str) -> int:
        self.required.add(token)
        return len(self.required)


@lru_cache
def renderer_of(name: str) -> Any:
    """The renderer, with a tokenizer that has its tokens."""
    create_renderer(every := AnyToken(), config_from_name(name))
    return create_renderer(MarkerTokenizer(every.required, eos="<|endoftext|>"), config_from_name(name))


def text_of(name: str, messages: Any, tools: Any = (), *, prompt: bool = False) -> str:
    """The text that a renderer writes."""
    renderer = renderer_of(name)
    ids = renderer.render_ids(
        [dict(each) for each in messages], tools=list(tools) or None, add_generation_prompt=prompt
    )
    return renderer._tokenizer.decode(ids)


def tokenizer_of(name: str, template: str | None = None) -> Any:
    """A tokenizer with the renderer's tokens, and with the template, or else the renderer in its place."""
    renderer = renderer_of(name)
    tokens = list(renderer._tokenizer._ids)
    eos = renderer._tokenizer.decode(renderer.get_stop_token_ids()[:1])
    bos = next((token for token in tokens if "begin▁of" in token or "begin_of_text" in token or token == "<bos>"), None)
    tokenizer = byte_tokenizer(template or " ".join(tokens), tokens, eos=eos, bos=bos)
    if template is None:

        def render(messages: Any, tools: Any = None, *, tokenize: bool, add_generation_prompt: bool) -> str:
            return text_of(name, messages, tools or (), prompt=add_generation_prompt)

        tokenizer.apply_chat_template = render
    return tokenizer


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """template(name): the text of a chat template in TRL's wheel."""
    folder = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "-d", str(folder), "trl==1.16.0"], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return lambda name: zipfile.ZipFile(wheel).read(f"trl/chat_templates/{name}.jinja").decode()


def reply_of(name: str, message: Any) -> str:
    """What the model samples for a message: the part of its text after the prompt."""
    prompt, text = (text_of(name, [USER], [ADD], prompt=True), text_of(name, [USER, message], [ADD]))
    while not text.startswith(prompt):
        prompt = prompt[: max(prompt.rfind("<", 0, -1), prompt.rfind("\n", 0, -1))]
    return text[len(prompt) :].removesuffix("\n")


def check_turns(name: str, tokenizer: Any) -> int:
    """Compare the text between turns. Returns the number of comparisons: a renderer may refuse to continue a row."""
    renderer = renderer_of(name)
    markers, stops = renderer._tokenizer, renderer.get_stop_token_ids()
    ends = tokenizer.convert_tokens_to_ids([markers.decode([token]) for token in stops])
    chat = ChatFormat(tokenizer, eos_token_ids=ends)
    prompt = text_of(name, [USER], [ADD], prompt=True)
    count = 0
    for message, follow in ((YES, [ON]), (CALLED, [RESULT]), (CALLED, [RESULT, RESULT])):
        reply = reply_of(name, message)
        if markers.encode(reply)[-1] not in stops:  # GLM: the next message begins
            reply += "<|observation|>" if message is CALLED else "<|user|>"
        bridged = renderer.bridge_to_next_turn(markers.encode(prompt), markers.encode(reply), follow, tools=[ADD])
        if bridged is None:
            continue
        bridged_text = markers.decode(bridged.token_ids)
        if name in LACKS_NEWLINE:
            bridged_text = bridged_text.replace("</assistant><", "</assistant>\n<")
        ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
        given = tokenizer.decode(chat.after_reply(follow, tools=[ADD], sampled_ids=ids))
        assert prompt + reply + given == bridged_text
        count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize("trl", TEMPLATES)
def test_the_template_of_a_family_is_what_its_renderer_writes(trl, template):
    name = TEMPLATES[trl]
    tokenizer = tokenizer_of(name, template(trl))
    compared = 0
    for key, (messages, tools) in CONVERSATIONS.items():
        prompt = messages[-1]["role"] != "assistant"
        try:
            text = render_chat(tokenizer, messages, tools, prompt=prompt)
        except Refusal:
            assert trl == "deepseekv3" and tools, key
            continue
        assert text == text_of(name, messages, tools, prompt=prompt), key
        compared += 1
    assert compared >= 5


@pytest.mark.slow
@pytest.mark.parametrize("trl", [name for name in TEMPLATES if name != "deepseekv3"])
def test_a_probed_template_continues_and_reads_as_its_renderer(trl, template):
    name = TEMPLATES[trl]
    tokenizer = tokenizer_of(name, template(trl))
    assert ChatFormat(tokenizer).tool_format().parse(reply_of(name, CALLED), [ADD]) == (CALL,)
    assert check_turns(name, tokenizer) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_calls_of_every_family_are_read(name):
    chat = ChatFormat(tokenizer_of(name))
    if name in UNREAD:
        with pytest.raises(ConfigError, match="cannot be read"):
            chat.tool_format()
        return
    found = chat.tool_format()
    assert (found.name in READ_BY_RENDERER) == (name in READ_BY_RENDERER)
    if not name.startswith("deepseek"):  # tools are described to them
        assert found.parse(reply_of(name, CALLED), [ADD]) == (CALL,)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("deepseek") and name not in UNREAD])
def test_a_row_of_every_family_continues_as_its_renderer_writes(name):
    assert check_turns(name, tokenizer_of(name)) >= 2


MADE = '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">7</parameter>\n</invoke>\n</minimax:tool_call>'


def test_calls_of_a_family_without_a_response_template_are_read():
    tokenizer = tokenizer_of("minimax-m2")
    chat = ChatFormat(tokenizer)
    form = chat.tool_format()
    assert form.name == "minimax-m2"
    made = ToolCall(name="add", arguments={"a": 7})
    assert form.parse(f"Hm</think>\n\n{MADE}[e~[", [ADD]) == (made,)
    assert form.parse(f"<think>{MADE}</think>Yes[e~[", [ADD]) == (), "a thought calls nothing"
    assert form.parse("Yes") == ()
    (cut,) = form.parse(MADE.removesuffix("</minimax:tool_call>"), [ADD])
    assert cut.error == "The tool call could not be read: unclosed block."
    (other,) = form.parse(MADE.replace("7", "seven"), [ADD])
    assert other.arguments == {"a": "seven"}, "the environment says what is wrong with a value"


def test_a_branch_of_such_a_family_has_thoughts_and_calls_in_their_places():
    tokenizer = tokenizer_of("minimax-m2")
    chat = ChatFormat(tokenizer)
    ids = tokenizer(f"Hm\n</think>\n\nLook\n{MADE}[e~[", add_special_tokens=False)["input_ids"]
    message = chat.reply_message(ids)
    assert message["reasoning_content"] == "Hm" and message["content"] == "Look"
    text, _ = chat.open([USER, message, RESULT], [ADD])
    assert text.endswith(
        f"<think>\nHm\n</think>\n\nLook\n{MADE}[e~[\n]~b]tool\n<response>14</response>[e~[\n]~b]ai\n<think>\n"
    )
    first, second = branches(tokenizer, ["Hm</think>Yes[e~[", "Hm</think>No[e~["], [None, "on"])
    assert "Hm" in tokenizer.decode(first.completion_ids) and "Hm" not in second.prompt
    assert second.prompt.endswith("]~b]ai\nYes[e~[\n]~b]user\non[e~[\n]~b]ai\n<think>\n")


@pytest.mark.parametrize("name", sorted(READ_BY_RENDERER))
def test_a_reply_with_a_call_that_cannot_be_read_keeps_its_text(name):
    tokenizer = tokenizer_of(name)
    chat = ChatFormat(tokenizer)
    cut = reply_of(name, CALLED).partition("then 7")[0]
    assert [call.error is None for call in chat.tool_format().parse(cut, [ADD])] == [False]
    message = chat.reply_message(tokenizer(cut, add_special_tokens=False)["input_ids"])
    assert "say" in message["content"] and "tool_calls" not in message


def test_a_call_without_the_empty_content_that_the_template_writes_before_it_is_read():
    reply = reply_of("inkling", CALLED)
    bare = reply.removeprefix("<|content_text|><|end_message|><|message_model|>")
    assert bare != reply
    form = ChatFormat(tokenizer_of("inkling")).tool_format()
    assert form.parse(bare, [ADD]) == form.parse(reply, [ADD]) == (CALL,)
    assert form.parse("<|content_text|>Yes<|end_message|>", [ADD]) == ()


def test_a_template_that_differs_from_the_family_is_not_taken_for_it():
    tokenizer = tokenizer_of("minimax-m2")
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *given, **options: render(*given, **options).replace("]~b]tool", "]~b]user")
    with pytest.raises(ConfigError, match=r"cannot be read\n.*environment.tool_format.*rlhf-episodes\[renderers\]"):
        ChatFormat(tokenizer).tool_format()


def test_the_marker_tokenizer_keeps_any_text():
    tokenizer = MarkerTokenizer(["<a>", "<a><b>"], eos="<a>")
    text = "<a><b><a>\n\ud800é"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) == 5 and tokenizer.eos_token_id == ids[1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\n\ud800é"
    assert tokenizer.convert_tokens_to_ids("<b>") is None
