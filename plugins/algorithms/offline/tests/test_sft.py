"""Supervised fine-tuning: what is learnt of a text or a conversation, and rows that hold several examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from rlhf_core.errors import DataError, UserInputError
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_offline.packing import example_lengths, packed_logits, plan_rows
from rlhf_testing.models import tiny_model, tiny_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789<>/ :\n"
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</assistant>"
    "{% endgeneration %}{% else %}{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role == 'user' }}{% endfor %}"
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]
RECORDS = [{"prompt": "31>", "completion": "13"}, {"prompt": "9>", "completion": "9"}] + [
    {"prompt": "8" * n, "completion": "1" * (n + 1)} for n in range(1, 6)
]


def chat_tokenizer(template: str) -> Any:
    tokenizer = tiny_tokenizer(LETTERS)
    tokenizer.chat_template = template
    return tokenizer


def learnt(tokenizer: Any, example: Any) -> list[str]:
    """The stretches of text that are learnt."""
    runs, open_run = [], ""
    for token, flag in zip(example.input_ids.tolist(), example.loss_mask.tolist(), strict=True):
        if flag:
            open_run += tokenizer.decode([token])
        elif open_run:
            runs.append(open_run)
            open_run = ""
    return [*runs, open_run] if open_run else runs


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by marks"])
@pytest.mark.parametrize(
    ("turns", "expected"), [("all", ["yes</assistant>", "no</assistant>"]), ("last", ["no</assistant>"])]
)
def test_only_the_assistant_is_learnt(algorithm: Any, template: str, turns: str, expected: list[str]) -> None:
    tokenizer = chat_tokenizer(template)
    example = algorithm("sft", {"turns": turns}, tokenizer).encode({"messages": TALK}, tokenizer)
    assert learnt(tokenizer, example) == expected
    whole = "<user>hi</user><assistant>yes</assistant><user>more</user><assistant>no</assistant>"
    assert "".join(tokenizer.decode([token]) for token in example.input_ids) == whole


def test_a_prompt_of_messages_ends_where_the_answer_begins(algorithm: Any) -> None:
    tokenizer = chat_tokenizer(PLAIN)
    record = {"prompt": TALK[:3], "completion": "no"}
    example = algorithm("sft", {"add_eos": False}, tokenizer).encode(record, tokenizer)
    assert learnt(tokenizer, example) == ["no"]


def test_the_prompt_of_a_conversation_is_what_comes_before_the_last_answer() -> None:
    """So the stream can measure it, and evaluation can ask for the answer."""
    prompt = PromptEncoder(chat_tokenizer(PLAIN)).prompt({"messages": TALK}, 0, "line 1")
    assert prompt.text == "<user>hi</user><assistant>yes</assistant><user>more</user><assistant>"
    with pytest.raises(DataError, match="line 1: `messages` is a str, not a list of chat messages"):
        PromptEncoder(chat_tokenizer(PLAIN)).prompt({"messages": "hi"}, 0, "line 1")


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        ({"prompt": "1"}, PLAIN, "no completion text"),
        ({"messages": TALK[:1]}, PLAIN, "no message of the conversation is the assistant's"),
        ({"messages": TALK}, None, "no chat template"),
        ({"messages": TALK}, FORGETFUL, "writes turn 2 differently once later turns follow"),
        ({"messages": TALK}, "{{ raise_exception('only one turn') }}", "refuses the messages: only one turn"),
        ({"messages": TALK}, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the messages: maximum recur"),
        (
            {"messages": TALK},
            "{% generation %}{% endgeneration %}{{ 1 / 0 }}",
            "refuses the messages: division by zero",
        ),
    ],
)
def test_records_that_cannot_be(algorithm: Any, record: dict[str, Any], template: str | None, message: str) -> None:
    tokenizer = chat_tokenizer(template or "")
    with pytest.raises(DataError, match=message):
        algorithm("sft", {}, tokenizer).encode(record, tokenizer)


def test_packing_changes_nothing_but_the_rows(algorithm: Any) -> None:
    model = tiny_model(seed=0)

    def run(options: dict[str, Any]) -> tuple[Any, torch.Tensor, Any]:
        made = algorithm("sft", options)
        batch = made.collate([made.encode(record, tiny_tokenizer()) for record in RECORDS])
        model.zero_grad()
        output = made.loss({"policy": model}, batch)
        torch.autograd.backward(output.sums["policy"] / made.counts(batch)["policy"])
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return batch, gradient, (made.counts(batch), output.sums["policy"].item(), output.metrics)

    padded, expected, (counts, total, metrics) = run({})
    packed, found, (packed_counts, packed_total, packed_metrics) = run({"packing": True, "max_tokens": 14})
    assert packed.input_ids.shape[0] < padded.input_ids.shape[0] == len(RECORDS) == len(packed) == len(padded)
    assert packed_counts == counts and packed_total == pytest.approx(total, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    right = "sft/token_accuracy"
    assert int(packed_metrics[right].total) == int(metrics[right].total)


def test_packed_examples_have_the_rotary_embeddings_of_their_own_lengths() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, max_position_embeddings=6, rope_parameters=rope, **sizes)
    model = LlamaForCausalLM(config).eval()
    examples = [torch.randint(1, 40, (length,)) for length in (4, 9, 12)]
    positions = torch.cat([torch.arange(len(ids)) for ids in examples])
    lengths = example_lengths(positions[None])[0]
    assert lengths.tolist() == [4] * 4 + [9] * 9 + [12] * 12
    packed = packed_logits(model, torch.cat(examples)[None], positions[None])[0]
    for ids, found in zip(examples, packed.split([4, 9, 12]), strict=True):
        alone = LlamaForCausalLM(config).eval()
        alone.load_state_dict(model.state_dict())
        torch.testing.assert_close(found, alone(ids[None]).logits[0], rtol=1e-4, atol=1e-5)


def flash_llama() -> torch.nn.Module:
    model = tiny_model(seed=0)
    model.config._attn_implementation = "flash_attention_2"
    return model


def recurrent() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(vocab_size=40, lru_width=16, **sizes))


@pytest.mark.parametrize("make_model", [flash_llama, recurrent])
def test_a_model_that_cannot_keep_packed_examples_apart_says_so(algorithm: Any, make_model: Any) -> None:
    model = make_model()
    made = algorithm("sft", {"packing": True})
    batch = made.collate([made.encode(record, tiny_tokenizer()) for record in RECORDS])
    with pytest.raises(UserInputError, match="cannot keep packed examples apart"):
        made.loss({"policy": model}, batch)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 20))
def test_rows_hold_every_example_once_within_their_room(lengths: list[int], room: int) -> None:
    rows = plan_rows(lengths, room)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(lengths[index] for index in row) <= room
