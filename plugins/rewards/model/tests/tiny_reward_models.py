"""Tiny reward models and tokenizers, made in code."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rlhf_testing.models import tiny_tokenizer

CHARACTERS = "0123456789>,abcdefghijklmnopqrstuvwxyz<|/ "
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def make_tokenizer(characters=CHARACTERS, template=TEMPLATE):
    tokenizer = tiny_tokenizer(characters)
    tokenizer.chat_template = template
    return tokenizer


def make_model(kind, tokenizer, *, labels=1, seed=0):
    sizes = {"vocab_size": len(tokenizer), "num_labels": labels, "pad_token_id": tokenizer.pad_token_id}
    rows = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16, "max_position_embeddings": 64}
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForSequenceClassification(LlamaConfig(**sizes, **rows, intermediate_size=32))
    if kind == "bert":
        return BertForSequenceClassification(BertConfig(**sizes, **rows, intermediate_size=32))
    return GPT2ForSequenceClassification(GPT2Config(**sizes, n_embd=16, n_layer=2, n_head=2, n_positions=64))
