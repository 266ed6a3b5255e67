"""A small chat model, made in seconds, that begins each conversation with a call of a tool."""

from __future__ import annotations

import torch

from rlhf_testing.episodes import CHARACTERS
from rlhf_testing.models import tiny_model, tiny_tokenizer

TEMPLATE = """
{%- if tools %}{{- 'may: ' }}{% for tool in tools %}{{- tool.function.name + ' ' }}{% endfor %}{{- '\n' }}{% endif %}
{%- for message in messages %}
{{- message.role + ': ' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}
"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
_STEPS = 400
_SURE = 2e-3
"""Nats a token: then the whole call is written nearly always."""


def save_tool_model(folder, *, tools, messages):
    """A model folder; the model answers `messages`, with `tools`, by `CALL`."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATE
    model = tiny_model(tokenizer, hidden_size=32)
    prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    reply = [*tokenizer(CALL, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    batch = torch.tensor([[*ids, *reply]])
    labels = batch.clone()
    labels[:, : len(ids)] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(_STEPS):
        loss = model(input_ids=batch, labels=labels).loss
        if loss.item() < _SURE:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        raise AssertionError(f"the model has not learnt its call: {loss.item():g}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
