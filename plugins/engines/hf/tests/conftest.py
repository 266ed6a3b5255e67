"""Tiny random models of several families, and engines over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf_core.components import EngineContext
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine, build
from rlhf_testing.models import tiny_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?"
VOCABULARY = len(CHARACTERS) + 4
EOS = 2
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 128}
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **COMMON, **GQA)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **COMMON)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **COMMON, **GQA, tie_word_embeddings=True)),
    "neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**SIZES, **COMMON, num_attention_heads=4, use_parallel_residual=False)
    ),
    "llama-eager": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **COMMON, **GQA, attn_implementation="eager")),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, **COMMON, **GQA, sliding_window=8)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, **COMMON)),
}


@pytest.fixture
def model() -> Callable[[str], nn.Module]:
    """A family's model with weights large enough that its distributions are far from uniform."""

    def make(family: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            module = FAMILIES[family]()
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.ndim == 2:
                        parameter.normal_(0.0, 0.15)
        return module.train()

    return make


@pytest.fixture
def engine() -> Callable[..., HfEngine]:
    """`engine(module, **options)` with a character tokenizer and run seed 11."""

    def make(module: nn.Module, tokenizer: object = None, **options: object) -> HfEngine:
        tokenizer = tokenizer or tiny_tokenizer(CHARACTERS)
        context = EngineContext(model=module, tokenizer=tokenizer, device=torch.device("cpu"), seed=11)
        return build(HfEngineConfig(**options), context)

    return make


@pytest.fixture(params=[True, False], ids=["packed", "as they are"])
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the tiny models' linear weights are packed, too: alone they are too small to gain by it."""
    if request.param:
        monkeypatch.setattr("rlhf_hf.prepack.MIN_MULTIPLICATIONS", 0)
    return bool(request.param)


@pytest.fixture
def requests() -> Callable[..., list[GenerationRequest]]:
    """`requests(count, same=1)`: prompts of 3 to 11 tokens, each given `same` times."""

    def make(count: int, same: int = 1) -> list[GenerationRequest]:
        made = []
        for index in range(count):
            prompt = index // same
            ids = tuple(
                4 + (prompt * 7 + place * 3 + place * place) % (VOCABULARY - 4) for place in range(3 + prompt % 9)
            )
            made.append(GenerationRequest(sample_id=1000 + index, prompt_ids=ids))
        return made

    return make


@pytest.fixture
def collect() -> Callable[..., dict[int, Completion]]:
    def run(engine: HfEngine, requests: list[GenerationRequest], sampling: SamplingParams) -> dict[int, Completion]:
        completions = list(engine.generate(requests, sampling))
        assert sorted(c.sample_id for c in completions) == sorted(r.sample_id for r in requests)
        return {completion.sample_id: completion for completion in completions}

    return run
