"""What a branch's prompt says of earlier replies: one message each, in the form that the template reads."""

from __future__ import annotations

from chat_templates import QWEN3, byte_tokenizer, chat_tokenizer
from playing import branches, driven, play_one

from rlhf_core.prompts.stream import PromptEncoder
from rlhf_episodes.contract import Outcome
from rlhf_testing.engine import FakeEngine

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def test_a_cut_turn_that_goes_on_is_one_message_of_a_branch():
    turns = ["<think>\nhe", "\n</think>\n\nhel", "lo<|im_end|>", "her<|im_end|>"]
    first, second = branches(chat_tokenizer("qwen3"), turns, [None, None, None, "on"])
    assert len(first.turns) == 3
    assert second.prompt.endswith(
        "user\nhello<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_after_an_ended_one_is_a_message_of_its_own():
    turns = ["<think>\nhe\n</think>\n\nhell<|im_end|>", "her<|im_end|>", "he<|im_end|>"]
    _, second = branches(chat_tokenizer("qwen3"), turns, [None, None, "on"])
    assert "assistant\nhell<|im_end|>\n<|im_start|>assistant\nher<|im_end|>\n" in second.prompt


def test_a_thought_between_special_tokens_is_cut_from_a_branch():
    tokenizer = byte_tokenizer(QWEN3, (*CHATML_TOKENS, "<think>", "</think>"), eos="<|im_end|>")
    turns = ["<think>\nhe\n</think>\n\nhello<|im_end|>", "her<|im_end|>"]
    _, second = branches(tokenizer, turns, [None, "on"])
    assert second.prompt.endswith("assistant\nhello<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n")


def test_a_fork_from_before_a_reply_went_on_has_only_its_beginning():
    tokenizer = chat_tokenizer("qwen3")
    found = []

    async def run(task, policy):
        await policy.turn()
        row = policy._episode.rows[0]
        mark = row.mark
        await policy.turn()
        found.extend([row.conversation, row.fork(1, mark).conversation, row.fork(1).conversation])
        return Outcome()

    prompt = PromptEncoder(tokenizer).prompt({"prompt": [{"role": "user", "content": "hello"}]}, 0, "test")
    engine = FakeEngine(answer=lambda request, version: tokenizer("he", add_special_tokens=False)["input_ids"])
    play_one(driven(run), engine=engine, tokenizer=tokenizer, prompt=prompt)
    assert [conversation[1:] for conversation in found] == [
        [{"role": "assistant", "content": text}] for text in ("hehe", "he", "hehe")
    ]
