"""Thoughts in the markers of each model: no calls are read from them, and a branch drops or keeps them."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, QWEN3, byte_tokenizer
from playing import branches
from reply_templates import reply_tokenizer

from rlhf_core.types import ToolCall
from rlhf_episodes.chat import ChatFormat
from rlhf_episodes.thinking import MARKERS, markers_of, split_thought
from rlhf_episodes.tool_calls import FORMATS

ADD = ToolCall(name="add", arguments={"a": 1})
KEPT = {
    "mistral": ("[THINK]her[/THINK]he</s>", "[INST]on[/INST]"),
    "seed-oss": (
        "<seed:think>her</seed:think>he<seed:eos>",
        "<seed:bos>user\non<seed:eos><seed:bos>assistant\n",
    ),
}


@pytest.mark.parametrize(("begin", "end"), MARKERS)
def test_a_thought_is_split_from_the_answer(begin, end):
    assert split_thought(f"{begin}a{end}b") == (f"{begin}a{end}", "b")
    assert split_thought(f"a{end}b") == (f"a{end}", "b")
    assert split_thought(f"\n{begin}a") == (f"\n{begin}a", "")
    assert split_thought(f"a {begin}") == ("", f"a {begin}")
    others = "".join(other for _, other in MARKERS if other != end)
    assert split_thought(f"{begin}a{others}b{end}c")[1] == "c", "a thought may mention the markers of other models"


@pytest.mark.parametrize(("begin", "end"), MARKERS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_calls_are_read_after_the_thought_only(form, begin, end):
    call, other = form.write("", [ADD]), form.write("", [ToolCall(name="no", arguments={})])
    reply = f"{begin}\n{other}\n{end}\n{call}"
    assert form.parse(reply) == (ADD,)
    assert form.parse(f"{begin}\n{call}") == ()
    if form.tag in call:
        assert form.content(f"{begin}{form.tag}{end}So.{call}", [ADD]) == f"{begin}{form.tag}{end}So."


@pytest.mark.parametrize("family", KEPT)
def test_a_template_that_keeps_thoughts_has_them_in_the_row_and_in_a_branch(family):
    tokenizer = reply_tokenizer(family)
    reply, between = KEPT[family]
    (row,) = branches(tokenizer, [reply, reply], [None, "on"])
    assert tokenizer.decode(row.completion_ids) == f"{reply}{between}{reply}"
    chat = ChatFormat(tokenizer)
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    text, _ = chat.open([{"role": "user", "content": "1"}, chat.reply_message(ids), {"role": "user", "content": "on"}])
    assert text.endswith(reply + between)
    assert not chat.check().cut_after and chat.thinks(ids)


@pytest.mark.slow
def test_a_template_that_drops_thoughts_drops_those_of_gemma4_from_a_branch():
    reply = "<|channel>thought\nher<channel|>he<turn|>"
    first, second = branches(reply_tokenizer("gemma4"), [reply, "he<turn|>"], [None, "on"])
    assert len(first.turns) == 1
    assert second.prompt.endswith("<|turn>model\nhe<turn|>\n<|turn>user\non<turn|>\n<|turn>model\n")


def test_a_reply_of_gemma4_without_a_thought_opens_no_branch():
    tokenizer = reply_tokenizer("gemma4")
    assert len(branches(tokenizer, ["he<turn|>", "he<turn|>"], [None, "on"])) == 1


@pytest.mark.parametrize(("begin", "end"), MARKERS[:3])
@pytest.mark.parametrize("special", [True, False], ids=["special-tokens", "text"])
def test_a_template_that_drops_thoughts_drops_them_in_any_markers(begin, end, special):
    template = QWEN3.replace("<think>", begin).replace("</think>", end)
    tokens = ("<|im_start|>", "<|im_end|>", *((begin, end) if special else ()))
    reply = f"{begin}\nhe\n{end}\n\nhello<|im_end|>"
    tokenizer = byte_tokenizer(template, tokens, eos="<|im_end|>")
    _, second = branches(tokenizer, [reply, "her<|im_end|>"], [None, "on"])
    assert second.prompt.endswith("assistant\nhello<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("begin", "end"), MARKERS)
def test_a_template_that_opens_a_thought_in_any_markers_has_it_whole_in_a_branch(begin, end):
    """As DeepSeek-R1's: the sampled text begins inside the thought."""
    template = CHATML.replace("'<|im_start|>assistant\n'", f"'<|im_start|>assistant\n{begin}\n'")
    tokenizer = byte_tokenizer(template, ("<|im_end|>", begin, end), eos="<|im_end|>")
    chat = ChatFormat(tokenizer)
    ids = tokenizer(f"her\n{end}he", add_special_tokens=False)["input_ids"]
    assert chat.reply_message(ids)["content"] == f"{begin}\nher\n{end}he"
    assert not chat.check().cut_after


THINKS = "her\n</think>\nhe<|im_end|>"


def test_a_thought_that_the_prompt_of_nemotron_3_began_is_dropped_from_a_branch():
    _, second = branches(reply_tokenizer("nemotron_3"), [THINKS, THINKS], [None, "on"])
    assert second.prompt.endswith(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think></think>\nhe<|im_end|>\n"
        "<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.slow
def test_a_thought_that_the_prompt_of_nemotron_3_began_is_kept_before_a_result():
    tokenizer = reply_tokenizer("nemotron_3")
    (row,) = branches(tokenizer, [THINKS, THINKS], [None, [{"role": "tool", "name": "add", "content": "7"}]])
    given = "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert tokenizer.decode(row.completion_ids) == THINKS + given + THINKS


def test_the_markers_of_a_model_are_those_it_knows():
    assert [markers_of(f"x {end} y") for _, end in MARKERS] == list(MARKERS)
    assert markers_of("") == MARKERS[0]
