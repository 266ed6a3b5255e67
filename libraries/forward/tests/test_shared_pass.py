"""A token's log-prob is that of its own row alone, whatever shares the pass, in the engine as in the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.batching import collate
from rlhf_core.components import EngineContext
from rlhf_core.types import BufferItem, GenerationRequest, Rollout, SamplingParams
from rlhf_forward.forward import policy_forward, value_forward
from rlhf_forward.logits import causal_lm_logits
from rlhf_forward.row_lengths import length_switches
from rlhf_passes.fast_passes import fast_passes
from rlhf_testing.models import tiny_tokenizer

VOCABULARY = 40
SWITCH = 12
"""Tokens up to which `longrope` is short, and `dynamic` NTK as it is trained."""
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 6.0, 9.0],
    "original_max_position_embeddings": SWITCH,
    "factor": 4.0,
}
PHI = {**SIZES, "original_max_position_embeddings": SWITCH, "rope_parameters": LONGROPE}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "gpt2": ("gpt2", {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "mistral": ("mistral", {**SIZES, "sliding_window": 6}),
    "gpt_neo": (
        "gpt_neo",
        {**COMMON, "hidden_size": 32, "num_heads": 4, "window_size": 8, "attention_types": [[["global", "local"], 1]]}
        | {"num_layers": 2, "max_position_embeddings": 64},
    ),
    "mamba": ("mamba", {**COMMON, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "rwkv": ("rwkv", {**COMMON, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {**SIZES, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8, "head_dim": 8},
    ),
    "bart": (
        "bart",
        {**COMMON, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 40, "decoder_attention_heads": 4},
    ),
    "phi3-longrope": ("phi3", PHI),
    "phi3-longrope-eager": ("phi3", {**PHI, "attn_implementation": "eager"}),
    "llama-dynamic": ("llama", {**SIZES, "max_position_embeddings": SWITCH, "rope_parameters": DYNAMIC}),
}
LENGTHS = [(3, 4), (9, 16), (5, 7), (14, 6), (2, 10), (4, 9)]
"""Of prompts and answers: on both sides of `SWITCH`, and across."""


def build(kind: str) -> nn.Module:
    model_type, options = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = options.get("attn_implementation", "sdpa")
        config = AutoConfig.for_model(model_type, **{k: v for k, v in options.items() if k != "attn_implementation"})
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, **({"attn_implementation": attention} if attention != "sdpa" else {})
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.2)
    return model.eval()


def item(index: int, prompt: Sequence[int], answer: Sequence[int], log_probs: Tensor | None = None) -> BufferItem:
    return BufferItem(
        sample_id=index,
        group_id=index,
        policy_version=0,
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(answer),
        action_mask=torch.ones(len(answer), dtype=torch.bool),
        action_log_probs=torch.zeros(len(answer)) if log_probs is None else log_probs,
    )


def ragged() -> list[BufferItem]:
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    return [item(index, ids(prompt), ids(answer)) for index, (prompt, answer) in enumerate(LENGTHS)]


def plain_log_probs(model: nn.Module, one: BufferItem) -> Tensor:
    """Of each answer token from a pass over what stands before it alone, as it was sampled."""
    ids = torch.cat([one.prompt_ids, one.response_ids])
    start = one.prompt_ids.numel()
    rows = [model(input_ids=ids[None, :end]).logits[0, -1].log_softmax(-1)[ids[end]] for end in range(start, len(ids))]
    return torch.stack(rows)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama-dynamic"])
@pytest.mark.parametrize("fast", [False, True])
@torch.no_grad()
def test_a_token_depends_on_its_own_rows_earlier_tokens_only(kind: str, fast: bool) -> None:
    model, items = build(kind), ragged()
    expected = [plain_log_probs(model, one) for one in items]
    for batch in (items, items[:2], [items[0], items[2]], [items[1]]):
        with fast_passes(*([model] if fast else [])):
            found = policy_forward(model, collate(batch), 1.0).log_probs
        for row, one in enumerate(batch):
            own = found[row, : one.num_response_tokens]
            torch.testing.assert_close(own, expected[one.sample_id], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("fast", [False, True])
@torch.no_grad()
def test_dynamic_scaling_is_that_of_a_rows_own_length(fast: bool) -> None:
    items = ragged()
    expected = [policy_forward(build("llama-dynamic"), collate([one]), 1.0).log_probs[0] for one in items]
    raw = [build("llama-dynamic")(torch.cat([one.prompt_ids, one.response_ids])[None]).logits[0] for one in items]
    model = build("llama-dynamic")
    model(torch.randint(3, VOCABULARY, (1, 60)))  # transformers remembers the longest row there ever was
    for _ in range(2):
        with fast_passes(*([model] if fast else [])):
            found = policy_forward(model, collate(items), 1.0).log_probs
        for row, (one, own, logits) in enumerate(zip(items, expected, raw, strict=True)):
            torch.testing.assert_close(found[row, : one.num_response_tokens], own, rtol=1e-5, atol=2e-5)
            by_hand = logits.log_softmax(-1)[one.prompt_ids.numel() - 1 : -1].gather(-1, one.response_ids[:, None])
            torch.testing.assert_close(own, by_hand[:, 0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_engine_and_trainer_agree_before_the_first_step(kind: str) -> None:
    from rlhf_hf.config import HfEngineConfig
    from rlhf_hf.engine import build as build_engine

    model = build(kind)
    context = EngineContext(model=model, tokenizer=tiny_tokenizer("abcdefgh"), device=torch.device("cpu"), seed=5)
    prompts = [tuple(one.prompt_ids.tolist()[:11]) for one in ragged()]
    asked = [GenerationRequest(sample_id=index, prompt_ids=prompt) for index, prompt in enumerate(prompts)]
    engine = build_engine(HfEngineConfig(), context)
    answers = sorted(engine.generate(asked, SamplingParams(max_new_tokens=12)), key=lambda each: each.sample_id)
    items = [
        item(i, r.prompt_ids, a.token_ids, torch.tensor(a.logprobs))
        for i, (r, a) in enumerate(zip(asked, answers, strict=True))
    ]
    if "dynamic" not in kind:
        assert max(one.num_tokens for one in items) > SWITCH + 4
    batch = collate(items)
    with fast_passes(model):
        gap = (policy_forward(model, batch, 1.0).log_probs - batch.action_log_probs).abs().max()
    assert gap < 1e-4


def test_gradients_are_those_of_the_rows_alone() -> None:
    model, items = build("phi3-longrope"), ragged()

    def gradients(batches: list[list[BufferItem]]) -> list[Tensor]:
        model.zero_grad()
        for batch in batches:
            with fast_passes(model):
                policy_forward(model, collate(batch), 1.0).log_probs.sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for one, other in zip(gradients([items]), gradients([[each] for each in items]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_values_are_of_each_rows_own_prefix() -> None:
    from rlhf_ppo.critic import Critic

    critic, items = Critic.from_pretrained(build("phi3-longrope")).eval(), ragged()
    critic.value_head.weight.normal_()
    with fast_passes(critic):
        values = value_forward(critic, collate(items))
        for row, one in enumerate(items):
            own = value_forward(critic, collate([one]))[0]
            torch.testing.assert_close(values[row, : len(own)], own, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_rows_on_either_side_of_the_switch_share_a_teacher_forced_pass() -> None:
    model, ids = build("phi3-longrope"), torch.randint(3, VOCABULARY, (2, 20))
    mask = torch.arange(20) < torch.tensor([[20], [8]])
    logits = causal_lm_logits(model, ids, mask)
    for row, length in enumerate((20, 8)):
        own = model(input_ids=ids[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(logits[row, :length], own, rtol=1e-5, atol=2e-5)


def test_which_models_depend_on_a_rows_length() -> None:
    assert length_switches(build("llama")) is None
    assert length_switches(build("phi3-longrope")) == {SWITCH}
    assert length_switches(build("llama-dynamic")) == frozenset()


@pytest.mark.parametrize("kind", ["llama-dynamic", "phi3-longrope"])
@torch.no_grad()
def test_score_models_read_each_row_for_itself(kind: str) -> None:
    from rlhf_reward_model.encoding import EncodedSample
    from rlhf_reward_model.reward import classify
    from rlhf_seed.rewards import NeuralReward

    config = build(kind).config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.score.weight.normal_()
    rows = [torch.cat([one.prompt_ids, one.response_ids]) for one in ragged()]
    expected = []
    for row in rows:
        model.model(input_ids=row[None, :1])  # transformers forgets the longest row that it has seen
        expected.append(float(model.score(model.model(input_ids=row[None]).last_hidden_state)[0, -1, 0]))
    together = classify(model, [EncodedSample(row.tolist(), [len(row) - 1]) for row in rows], torch.device("cpu"))[:, 0]
    assert together.tolist() == pytest.approx(expected, abs=2e-5)
    rollouts = [rollout(row.tolist()) for row in rows]
    scores = NeuralReward(model, torch.device("cpu"), offload=False, where="here")(rollouts)
    assert scores == pytest.approx(expected, abs=2e-5)


def rollout(ids: list[int]) -> Rollout:
    return Rollout(
        sample_id=0,
        prompt="",
        messages=None,
        prompt_ids=ids[:1],
        completion="",
        completion_ids=ids[1:],
        logprobs=[0.0] * (len(ids) - 1),
        answer=None,
        metadata={},
        policy_version=0,
        finish_reason="stop",
    )
