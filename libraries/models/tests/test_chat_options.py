"""`model.chat` holds wherever the template is used, for the templates of known families."""

import copy
import json

import pytest
from chat_templates import chat_tokenizer as shared_tokenizer

from rlhf_core.config.sections import ChatConfig
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.prompts.encoder import PromptEncoder
from rlhf_episodes.chat import ChatFormat
from rlhf_models.chat_options import set_chat_options

HELLO = [{"role": "user", "content": "hello"}]
SHOWS_MODE = "{%- if mode is defined %}{{- '[' ~ mode ~ ']' }}{%- endif -%}\n"
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def chat_tokenizer(family):
    """One of this test alone."""
    return copy.deepcopy(shared_tokenizer(family))


def changed(family, *, template_front="", **options):
    tokenizer = chat_tokenizer(family)
    tokenizer.chat_template = template_front + tokenizer.chat_template
    set_chat_options(tokenizer, ChatConfig(**options))
    return tokenizer


def prompt(tokenizer, messages=HELLO):
    return PromptEncoder(tokenizer).prompt({"prompt": messages}, 0, "line 1")


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma", "chatml"])
@pytest.mark.parametrize("value", [False, None, 3, "a 'b' \"c\" \\ {% x %} \U0001f600", [1, {"k": None}]], ids=str)
def test_kwargs_reach_the_templates_of_every_family(family, value):
    tokenizer = changed(family, template_front=SHOWS_MODE, kwargs={"mode": value})
    plain = chat_tokenizer(family)
    expected = plain.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    found = prompt(tokenizer)
    assert found.text == f"[{value}]{expected}"
    assert found.prompt_ids == tuple(plain(found.text, add_special_tokens=False)["input_ids"])
    assert ChatFormat(tokenizer).open(HELLO)[0] == found.text, "environments and `rlhf serve` render by this"


def test_options_of_a_template_that_overflows_leave_its_error_to_the_prompt():
    tokenizer = changed("chatml", template_front="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", kwargs={"mode": 1})
    with pytest.raises(DataError, match="maximum recursion depth"):
        prompt(tokenizer)


def test_thinking_is_switched_off_as_the_family_does_it():
    plain = chat_tokenizer("qwen3")
    expected = plain.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert expected.endswith("<think>\n\n</think>\n\n")
    tokenizer = changed("qwen3", kwargs={"enable_thinking": False})
    assert prompt(tokenizer).text == expected
    thinking = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert "</think>" not in thinking, "what a caller says comes first"


@pytest.mark.parametrize("family", ["llama3", "qwen3", "chatml"])
def test_a_system_message_stands_where_there_is_none(family):
    system = {"role": "system", "content": "be 'kind'\n{{ x }}"}
    tokenizer = changed(family, system=system["content"])
    plain = chat_tokenizer(family)
    assert prompt(tokenizer).text == prompt(plain, [system, *HELLO]).text
    own = [{"role": "system", "content": "mine"}, *HELLO]
    assert prompt(tokenizer, own).text == prompt(plain, own).text


def test_a_family_without_system_messages_says_so():
    with pytest.raises(DataError, match="refuses the messages"):
        prompt(changed("gemma", system="be kind"))


def test_tools_are_shown_where_none_are_given(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    tokenizer = changed("qwen3", tools=str(tmp_path / "tools.json"))
    plain = chat_tokenizer("qwen3")
    expected = plain.apply_chat_template(HELLO, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert prompt(tokenizer).text == expected and '"add"' in expected
    other = {"type": "function", "function": {**TOOL["function"], "name": "other"}}
    assert '"add"' not in ChatFormat(tokenizer).open(HELLO, [other])[0]


def test_a_template_file_and_what_is_saved_with_the_model(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}{{ tail }}")
    tokenizer = changed("llama3", template=str(tmp_path / "t.jinja"), kwargs={"tail": "end"}, system="s")
    assert prompt(tokenizer).text == "s!hello!end"
    tokenizer.save_pretrained(tmp_path / "saved")
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert prompt(saved).text == "s!hello!end"
    set_chat_options(saved, ChatConfig(kwargs={"tail": "end"}, system="s"))
    assert prompt(saved).text == "s!hello!end", "given twice they are the same"


@pytest.mark.parametrize(
    ("files", "options", "told"),
    [
        ({}, {"template": "none.jinja"}, "model.chat.template: cannot read"),
        ({"t.jinja": "{% if %}"}, {"template": "t.jinja", "kwargs": {"a": 1}}, r"cannot be read: .*\(line 1\)"),
        ({"t.json": "{"}, {"tools": "t.json"}, "not JSON"),
        ({"t.json": '{"a": 1}'}, {"tools": "t.json"}, "not a list of tools"),
    ],
)
def test_wrong_files(tmp_path, monkeypatch, files, options, told):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=told):
        changed("chatml", **options)


def test_a_tokenizer_without_a_template_and_names_that_cannot_be_set():
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="lacks a chat template"):
        set_chat_options(tokenizer, ChatConfig(kwargs={"a": 1}))
    for name in ("messages", "a b", "{{"):
        with pytest.raises(ValueError, match="cannot be set"):
            ChatConfig(kwargs={name: 1})


def test_content_in_parts_is_refused_by_name():
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(DataError, match=r"`content` is a list, not text") as caught:
        prompt(chat_tokenizer("chatml"), [{"role": "user", "content": parts}])
    assert caught.value.where == "line 1"
