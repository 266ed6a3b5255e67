"""Conversations as ids, for templates in the manner of known families (tests/support/chat_templates.py)."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, FAMILIES, LLAMA3, byte_ids, byte_tokenizer, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_episodes.chat import ChatFormat
from rlhf_testing.models import tiny_tokenizer

KEEPS_HISTORY = [name for name in FAMILIES if name != "qwen3-no-thinking"]
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def after(family, messages, sampled, **options):
    """Decoded: what stands between a turn that ended with the token `sampled` and the next."""
    tokenizer = chat_tokenizer(family)
    ids = ChatFormat(tokenizer).after_reply(
        messages, sampled_ids=tokenizer.convert_tokens_to_ids(["h", sampled]), **options
    )
    return tokenizer.decode(ids)


def rows(tokenizer, opening, rounds, tools=()):
    """The ids of a row as a player makes it, and the text that the template gives for the whole conversation.

    rounds: for each turn of the policy its text, whether its end was sampled, and the messages that follow.
    """
    chat = ChatFormat(tokenizer)
    messages = list(opening)
    ids = list(chat.open(messages, tools)[1])
    for text, ended, follow in rounds:
        end = chat.end_of_turn_id
        sampled = [*byte_ids(tokenizer, text), *([end] if ended and end is not None else [])]
        ids += [*sampled, *chat.after_reply(follow, tools=tools, sampled_ids=sampled)]
        messages += [assistant(text), *follow]
    return ids, chat.open(messages, tools)[0]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8).map(str.strip)
USER_ROUNDS = st.lists(st.tuples(TEXTS, st.booleans(), st.tuples(TEXTS.map(user))), max_size=4)
TOOL_ROUNDS = st.lists(
    st.tuples(TEXTS, st.booleans(), st.lists(TEXTS.map(tool), min_size=1, max_size=2).map(tuple)), max_size=4
)


@pytest.mark.parametrize("family", KEEPS_HISTORY)
@settings(max_examples=30, deadline=None)
@given(question=TEXTS, rounds=USER_ROUNDS)
def test_a_growing_row_is_what_the_template_writes(family, question, rounds):
    tokenizer = chat_tokenizer(family)
    ids, whole = rows(tokenizer, [user(question)], rounds)
    assert tokenizer.decode(ids) == whole


@settings(max_examples=30, deadline=None)
@given(question=TEXTS, rounds=USER_ROUNDS)
def test_a_template_that_cuts_thinking_differs_in_that_alone(question, rounds):
    tokenizer = chat_tokenizer("qwen3-no-thinking")
    ids, whole = rows(tokenizer, [user(question)], rounds)
    row = tokenizer.decode(ids)
    assert row.count(EMPTY_THOUGHT) == len(rounds) + 1 and whole.count(EMPTY_THOUGHT) == 1
    assert row.replace(EMPTY_THOUGHT, "") == whole.replace(EMPTY_THOUGHT, "")


@pytest.mark.parametrize("family", ["chatml", "qwen2", "qwen3", "llama3", "gemma"])
@settings(max_examples=20, deadline=None)
@given(question=TEXTS, rounds=TOOL_ROUNDS, thinks=st.booleans())
def test_rows_with_tools_are_what_the_template_writes(family, question, rounds, thinks):
    tokenizer = chat_tokenizer(family)
    if thinks:  # thinking between calls of tools is history that Qwen3 keeps
        rounds = [(f"<think>\n{text or 'I'}\n</think>\n\ncall", ended, follow) for text, ended, follow in rounds]
    ids, whole = rows(tokenizer, [user(question)], rounds, [ADD])
    assert tokenizer.decode(ids) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_that_of_the_prompt_stream(family):
    tokenizer = chat_tokenizer(family)
    messages = [user("Say hello there"), assistant("hello"), user("Again")]
    prompt = PromptEncoder(tokenizer).prompt({"prompt": messages}, 0, "record 1")
    assert ChatFormat(tokenizer).open(messages) == (prompt.text, prompt.prompt_ids)


@pytest.mark.parametrize("family", ["llama3", "gemma"])
def test_a_beginning_is_written_once(family):
    tokenizer = chat_tokenizer(family)
    assert tokenizer("h")["input_ids"][0] == tokenizer.bos_token_id  # encoding by itself would add one
    ids, _ = rows(tokenizer, [user("1")], [("2", True, [user("3")]), ("4", False, [user("5")])])
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


def test_sampled_text_is_not_encoded_again():
    tokenizer = chat_tokenizer("chatml")
    ids, whole = rows(tokenizer, [user("hello")], [("hello", True, [user("hello")])])
    encoded = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == whole and len(ids) == len(encoded) + 4  # five bytes against one token


@pytest.mark.parametrize(
    ("family", "end", "between"),
    [
        ("chatml", "<|im_end|>", "\n<|im_start|>user\nOn<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen3-no-thinking",
            "<|im_end|>",
            f"\n<|im_start|>user\nOn<|im_end|>\n<|im_start|>assistant\n{EMPTY_THOUGHT}",
        ),
        (
            "llama3",
            "<|eot_id|>",
            "<|start_header_id|>user<|end_header_id|>\n\nOn<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("gemma", "<end_of_turn>", "\n<start_of_turn>user\nOn<end_of_turn>\n<start_of_turn>model\n"),
    ],
)
def test_a_cut_turn_is_given_its_end_and_an_ended_one_is_not(family, end, between):
    assert after(family, [user("On")], end) == between
    assert after(family, [user("On")], "h") == end + between


def test_any_end_of_text_stands_for_the_end_of_turn():
    between = "\n<start_of_turn>user\nOn<end_of_turn>\n<start_of_turn>model\n"
    assert after("gemma", [user("On")], "<eos>") == between
    tokenizer = chat_tokenizer("llama3")
    other = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    assert ChatFormat(tokenizer).after_reply([user("On")], sampled_ids=[other])[0] == tokenizer.eos_token_id
    chat = ChatFormat(tokenizer, eos_token_ids=[other])  # as the model's generation config has it
    assert chat.eos_token_ids == {tokenizer.eos_token_id, other}
    given = tokenizer.decode(chat.after_reply([user("On")], sampled_ids=[other]))
    assert given.startswith("<|start_header_id|>user")


def test_an_end_that_begins_the_next_message_is_not_written_twice():
    tokenizer = chat_tokenizer("no-end")
    begins = tokenizer.convert_tokens_to_ids(["<|user|>", "<|endoftext|>"])
    chat = ChatFormat(tokenizer, eos_token_ids=begins)
    texts = [tokenizer.decode(chat.after_reply([user("On")], sampled_ids=[token])) for token in begins]
    assert texts == ["\nOn<|assistant|>\n", "<|user|>\nOn<|assistant|>\n"]


def test_an_end_that_is_no_token_is_written_behind_a_sampled_end():
    template = CHATML.replace("<|im_end|>", "[END]")
    tokenizer = byte_tokenizer(template, ["<eos>"])
    chat = ChatFormat(tokenizer)
    assert chat.end_of_turn_id is None and chat.eos_token_ids == {tokenizer.eos_token_id}
    ids = chat.after_reply([user("On")], sampled_ids=[tokenizer.eos_token_id])
    assert tokenizer.decode(ids) == "[END]\n<|im_start|>user\nOn[END]\n<|im_start|>assistant\n"


def test_without_messages_a_cut_turn_goes_on_and_an_ended_one_is_followed_by_another():
    assert after("chatml", [], "h") == ""
    assert after("chatml", [], "<|im_end|>") == "\n<|im_start|>assistant\n"
    assert ChatFormat(chat_tokenizer("chatml")).after_reply([], sampled_ids=[]) == ()


def test_what_a_tool_writes_is_only_content():
    """Not even a text that stands for the reply inside, or half of a surrogate pair."""
    assert after("chatml", [user("Zq7Reply Zq7Earlier")], "h").count("Zq7Reply") == 1
    assert "a?b" in after("chatml", [user("a\ud800b")], "h")


@pytest.mark.parametrize(
    ("family", "cut", "cut_thinking"),
    [
        ("chatml", (), ()),
        ("qwen2", (), ()),
        ("qwen3", (), ("user",)),
        ("qwen3-no-thinking", ("user", "tool"), ("user", "tool")),
        ("llama3", (), ()),
        ("gemma", (), ()),
        ("no-end", (), ()),
    ],
)
def test_the_check_says_what_is_cut(family, cut, cut_thinking):
    chat = ChatFormat(chat_tokenizer(family))
    found = chat.check([ADD])
    assert chat.check([ADD]) is found  # it is asked at each turn
    assert found.cut_after == {(role, False) for role in cut} | {(role, True) for role in cut_thinking}
    assert found.error is None
    assert found.cuts([user("a")], thinking=True) == bool(cut_thinking)
    assert found.cuts([tool("a")], thinking=True) == ("tool" in cut_thinking)
    assert found.cuts([user("a")], thinking=False) == bool(cut)
    assert chat.check().cuts([user("a")], thinking=True) == bool(cut_thinking)


def test_a_branch_is_rendered_anew_without_what_is_cut():
    chat = ChatFormat(chat_tokenizer("qwen3"))
    text, _ = chat.open([user("1"), assistant("<think>\nHm\n</think>\n\n2"), user("3")])
    assert text.endswith("<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_opens_a_thought_by_itself():
    """As DeepSeek-R1's: the sampled text begins inside the thought, and a message has the whole thought."""
    template = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    tokenizer = byte_tokenizer(template)
    chat = ChatFormat(tokenizer)
    assert not chat.check().cut_after
    assert chat.reply_message(byte_ids(tokenizer, "he</think>I")) == assistant("<think>\nhe</think>I")
    cutting = template.replace("+ message['content'] +", "+ message['content'].split('</think>')[-1] +")
    found = ChatFormat(byte_tokenizer(cutting)).check()
    assert found.cut_after == {("user", True)}


def test_what_stands_between_turns_may_not_depend_on_the_length_of_the_conversation():
    template = CHATML.replace(
        "message['role'] +", "message['role'] + (loop.index | string if loop.index > 3 else '') +"
    )
    chat = ChatFormat(byte_tokenizer(template))
    with pytest.raises(ConfigError, match=r"the length of the conversation.*\n.*environment.history: branch"):
        chat.after_reply([user("On")], sampled_ids=[1])
    found = chat.check()  # such a row can still branch at each turn
    assert found.error is not None and found.cuts([user("On")], thinking=False)


def test_a_template_that_does_not_write_replies_as_they_are():
    template = CHATML.replace("message['content']", "message['content'] | upper")
    chat = ChatFormat(byte_tokenizer(template))
    assert chat.end_of_turn_id is None
    with pytest.raises(ConfigError, match="changes the text of an assistant's reply"):
        chat.after_reply([user("On")], sampled_ids=[1])


def test_a_refusal_is_named():
    chat = ChatFormat(chat_tokenizer("gemma"))
    with pytest.raises(DataError, match=r"roles system, user: System role not supported\n.*environment"):
        chat.open([{"role": "system", "content": "Be brief"}, user("1")])
    with pytest.raises(DataError, match="roles must alternate"):
        chat.after_reply([user("1"), user("2")], sampled_ids=[1])
    with pytest.raises(DataError, match="refuses messages of the roles user, assistant, None"):
        chat.after_reply([{"text": "no message"}], sampled_ids=[1])


def test_a_message_that_is_left_out_is_named():
    template = CHATML.replace("in messages", "in messages if message['role'] != 'system'")
    chat = ChatFormat(byte_tokenizer(template))
    with pytest.raises(DataError, match="leaves out messages of the role system"):
        chat.after_reply([{"role": "system", "content": "Be brief"}], sampled_ids=[1])
    assert chat.after_reply([user("1")], sampled_ids=[1])


def test_a_tokenizer_without_a_template_takes_text_only():
    chat = ChatFormat(tiny_tokenizer())
    assert chat.text_ids("12>") == (5, 6, 14) and chat.text_ids("") == ()
    assert chat.eos_token_ids == {2}
    with pytest.raises(DataError, match="chat messages, but the tokenizer does not have a chat template"):
        chat.open([user("1")])


def test_text_that_is_appended_gets_no_special_token_and_no_blank():
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0, "▁one": 1, "one": 2, "▁two": 3, "x": 4, "▁x": 5, "▁\n": 6}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split("\n", "merged_with_previous")]
    )
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert tokenizer("one two")["input_ids"] == [1, 3]
    assert ChatFormat(tokenizer).text_ids("one two") == (2, 3)
    glued = byte_tokenizer(None, ["<eos>", "\nx"])  # a tokenizer that has one token for both
    assert ChatFormat(glued).text_ids("x1") == tuple(glued("x1")["input_ids"])
    llama = chat_tokenizer("llama3")
    assert llama.decode(ChatFormat(llama).text_ids("hello")) == "hello"


@pytest.mark.parametrize(
    ("family", "name", "native"),
    [("chatml", "hermes", False), ("qwen2", "hermes", True), ("qwen3", "hermes", True), ("llama3", "llama3", True)],
)
def test_the_format_of_calls_follows_the_template(family, name, native):
    chat = ChatFormat(chat_tokenizer(family))
    assert chat.tool_format().name == name
    text, _ = chat.open([user("1")], [ADD])
    assert text.count('"name": "add"') == 1
    assert ("These functions are available" in text) == (not native)


def test_a_format_that_is_not_the_templates_is_described():
    chat = ChatFormat(chat_tokenizer("llama3"), tool_format="hermes")
    text, _ = chat.open([{"role": "system", "content": "Be brief."}, user("1")], [ADD])
    assert "Be brief.\n\n# Tools" in text and "<tool_call>" in text and "in the format" not in text
    assert "<tool_response>\n3\n</tool_response>" in after("chatml", [tool("3")], "h", tools=[ADD])


def test_tools_are_described_to_the_user_where_there_is_no_system():
    text, _ = ChatFormat(chat_tokenizer("gemma")).open([user("One?")], [ADD])
    assert text.startswith("<bos><start_of_turn>user\n# Tools")
    assert text.endswith("</tool_call>\n\nOne?<end_of_turn>\n<start_of_turn>model\n")


def test_results_of_several_tools_and_a_message_are_one_turn_where_roles_alternate():
    given = after("gemma", [tool("3"), tool("4"), user("On")], "<end_of_turn>", tools=[ADD])
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>\nOn"
    assert given == f"\n<start_of_turn>user\n{results}<end_of_turn>\n<start_of_turn>model\n"


def test_a_templates_own_form_of_calls_that_is_not_known():
    template = LLAMA3.replace('{"name": "\' + call.name', "<call>' + call.name")
    chat = ChatFormat(byte_tokenizer(template, FAMILIES["llama3"][1], eos="<|eot_id|>", bos="<|begin_of_text|>"))
    with pytest.raises(ConfigError, match=r"form that cannot be read\n.*tool_format to one of hermes, mistral, llama3"):
        chat.open([user("1")], [ADD])


def test_an_unknown_format():
    with pytest.raises(ConfigError, match=r"environment.tool_format: unknown tool format 'xml'\n.*one of auto, hermes"):
        ChatFormat(chat_tokenizer("chatml"), tool_format="xml")
