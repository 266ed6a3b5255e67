"""Inputs of both sides of a comparison: the same model, tokenizer, reward model and prompts, as files.

The models are random Llamas of two sizes. Their embeddings share one constant feature, through which the head makes
special tokens impossible and, for answers of varied length, ends an answer at each token with the same probability.
Lengths are then geometric, independent of the random weights.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from grpo_inputs import SUBJECTS, notes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS = 0, 1, 2
MEAN_VARIED_TOKENS = 26
"""Mean of the geometric lengths before truncation at `new_tokens`."""
PROMPT_TOKENS = (16, 64)
CHAT_TEMPLATE = (
    "{% for message in messages %}w7 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
)
ASKED = (
    "Write a long story about",
    "Explain to a child, and take your time, everything that you know about",
    "Write a long poem about",
    "Two old friends talk for a whole evening. Write down what they say about",
)
"""Starts of the prompts about each of `SUBJECTS`, whose answers have nearly the maximum length."""


@dataclass(frozen=True)
class Size:
    """Shape of a Llama."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int


SIZES = {
    "S": Size(128, 4, 4, 512, 512),
    "M": Size(512, 8, 8, 1536, 8192),
    "0.5B": Size(896, 24, 14, 4864, 32_000),
    "1.5B": Size(1536, 28, 12, 8960, 32_000),
}
"""1.18M and 35.7M parameters. The others are for a GPU."""
REWARD = Size(32, 1, 2, 64, 0)
"""Shape of the reward model, small enough that its time is negligible."""


def write_real_inputs(folder: Path, model: Path, *, num_prompts: int, prompt_words: int = 0) -> None:
    """Like `write_inputs`, for a model folder: a link to it, a reward model with its tokens, and prompts for it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = _config(REWARD, len(tokenizer), pad=tokenizer.convert_tokens_to_ids(tokenizer.unk_token))
        LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    asked = [" ".join([f"{start} {each}.", *notes(prompt_words)]) for start in ASKED for each in SUBJECTS]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in itertools.islice(itertools.cycle(asked), num_prompts)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def write_inputs(folder: Path, size: str, *, varied: bool, num_prompts: int) -> None:
    """Write `folder/model`, `folder/reward` (each with the tokenizer) and `folder/prompts.jsonl`."""
    shape = SIZES[size]
    tokenizer = build_tokenizer(shape.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = _policy(shape, varied)
        reward = LlamaForSequenceClassification(_config(REWARD, shape.vocabulary))
    for model, name in ((policy, "model"), (reward, "reward")):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [json.dumps({"prompt": text}) for text in prompt_texts(shape.vocabulary, num_prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def write_chat_model(folder: Path, size: str) -> None:
    """Write `folder`, a model whose answers have the maximum length, with a chat template."""
    tokenizer = build_tokenizer(SIZES[size].vocabulary)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _policy(SIZES[size], varied=False).save_pretrained(folder)


def _policy(shape: Size, varied: bool) -> LlamaForCausalLM:
    policy = LlamaForCausalLM(_config(shape, shape.vocabulary))
    _shape_endings(policy, varied)
    return policy


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Create a tokenizer in which every token is a word: `w7` is token 7."""
    words = {word: index for index, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocabulary))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def peak_bytes(device: str) -> int:
    """Peak memory so far: of the GPU as counted by torch, or the high-water mark of this process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def prompt_texts(vocabulary: int, count: int) -> list[str]:
    """Different prompts of 16 to 64 tokens, not sorted by length."""
    generator = torch.Generator().manual_seed(0)
    shortest, longest = PROMPT_TOKENS
    texts = []
    for index in range(count):
        length = shortest + (longest - shortest) * (index * 13 % 32) // 31
        ids = torch.randint(len(SPECIAL), vocabulary, (length,), generator=generator).tolist()
        texts.append(" ".join(f"w{i}" for i in ids))
    return texts


def _config(shape: Size, vocabulary: int, pad: int = PAD) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        pad_token_id=pad,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        num_labels=1,
    )


@torch.no_grad()
def _shape_endings(model: LlamaForCausalLM, varied: bool) -> None:
    """Make feature 0 constant, from which the head reads the logits of special tokens."""
    vocabulary = model.config.vocab_size
    model.model.embed_tokens.weight[:, 0] = 2.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    head = model.lm_head.weight
    head[:, 0] = 0.0
    ids = torch.randint(len(SPECIAL), vocabulary, (4, 128))
    hidden = model.model(input_ids=ids).last_hidden_state
    feature = hidden[..., 0].mean()
    others = (hidden @ head[len(SPECIAL) :].T).exp().sum(-1).mean().log()
    head[: len(SPECIAL)] = 0.0
    head[: len(SPECIAL), 0] = (others - 30.0) / feature
    if varied:
        share = 1 / MEAN_VARIED_TOKENS
        head[EOS, 0] = (others + math.log(share / (1 - share))) / feature
