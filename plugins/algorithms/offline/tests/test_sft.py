"""Supervised fine-tuning: what is learnt of a text or a conversation, and rows that hold several examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from rlhf_core.errors import DataError
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_passes.fast_passes import fast_passes
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
        ({"prompt": "1"}, PLAIN, "lacks a completion text"),
        ({"messages": TALK[:1]}, PLAIN, "lacks an assistant message"),
        ({"messages": TALK}, None, "lacks a chat template"),
        ({"messages": TALK}, FORGETFUL, "renders turn 2 differently if later turns follow"),
        ({"messages": TALK}, "{{ raise_exception('only one turn') }}", "rejects the messages: only one turn"),
        ({"messages": TALK}, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rejects the messages: maximum recur"),
        (
            {"messages": TALK},
            "{% generation %}{% endgeneration %}{{ 1 / 0 }}",
            "rejects the messages: division by zero",
        ),
    ],
)
def test_records_that_cannot_be(algorithm: Any, record: dict[str, Any], template: str | None, message: str) -> None:
    tokenizer = chat_tokenizer(template or "")
    with pytest.raises(DataError, match=message):
        algorithm("sft", {}, tokenizer).encode(record, tokenizer)


def learn(made: Any, model: torch.nn.Module, records: list[dict[str, str]]) -> tuple[torch.Tensor, Any]:
    """The gradient of an update, and what the algorithm gave."""
    batch = made.collate([made.encode(record, tiny_tokenizer()) for record in records])
    model.zero_grad()
    with fast_passes(model):
        output = made.loss({"policy": model}, batch)
        torch.autograd.backward(output.sums["policy"] / made.counts(batch)["policy"])
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return gradient, (made.counts(batch), output)


def assert_packing_changes_nothing(algorithm: Any, model: torch.nn.Module) -> None:
    expected, (counts, padded) = learn(algorithm("sft"), model, RECORDS)
    found, (packed_counts, packed) = learn(algorithm("sft", {"packing": True}), model, RECORDS)
    assert packed_counts == counts and packed.sums["policy"].item() == pytest.approx(padded.sums["policy"].item())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    right = "sft/token_accuracy"
    assert int(packed.metrics[right].total) == int(padded.metrics[right].total)


def test_packing_changes_nothing_but_the_rows(algorithm: Any) -> None:
    model, shapes = tiny_model(seed=0), []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: shapes.append(args[0].shape))
    assert_packing_changes_nothing(algorithm, model)
    handle.remove()
    padded, packed = shapes
    assert padded[0] == len(RECORDS) and packed[0] == 1 and packed.numel() < padded.numel()


def test_packed_examples_have_the_rotary_embeddings_of_their_own_lengths(algorithm: Any) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, max_position_embeddings=6, rope_parameters=rope, **sizes)
    model = LlamaForCausalLM(config)
    made = algorithm("sft", {"packing": True})
    _, (_, together) = learn(made, model, RECORDS)
    alone = [learn(made, model, [record])[1][1].sums["policy"].item() for record in RECORDS]
    assert together.sums["policy"].item() == pytest.approx(sum(alone), rel=1e-5)
    assert_packing_changes_nothing(algorithm, model)


def test_a_model_that_cannot_keep_packed_examples_apart_runs_padded(algorithm: Any) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(vocab_size=40, lru_width=16, **sizes))
    assert_packing_changes_nothing(algorithm, model)
