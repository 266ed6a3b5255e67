"""Answers and scores from a model folder, outside a run: `rlhf generate` and `rlhf eval`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, cast

from ..config.resolve import SelectedReward
from ..config.sections import ModelConfig
from ..contexts import engine_context, own_device, prompts_context, reward_context
from ..hooks.relay import HookRelay
from ..models.loading import check_model, load_policy, load_tokenizer
from ..plugins.discovery import load, resolve_build
from ..prompts.stream import PromptEncoder
from ..protocols import RolloutEngine
from ..rewards.scorer import RewardScorer, reward_spec
from ..rollout.maker import PolicyExperienceMaker
from ..rollout.single_answer import SingleAnswers
from ..types import GenerationRequest, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def generate_text(
    model: str, prompts: Sequence[str], *, engine: str, sampling: SamplingParams, seed: int, device: str
) -> list[str]:
    """A completion of each prompt. A tokenizer with a chat template gets the prompt as a user message."""
    answering, tokenizer = _open(model, engine, seed, device)
    with closing(answering):
        encoder = PromptEncoder(tokenizer, text_as_chat=bool(tokenizer.chat_template))
        encoded = [encoder.prompt({"prompt": text}, i, f"prompt {i + 1}") for i, text in enumerate(prompts)]
        requests = [GenerationRequest(sample_id=p.position, prompt_ids=p.prompt_ids) for p in encoded]
        answers = {done.sample_id: list(done.token_ids) for done in answering.generate(requests, sampling)}
    return [str(tokenizer.decode(answers[p.position], skip_special_tokens=True)) for p in encoded]


def evaluate_folder(
    model: str,
    prompts_file: str,
    rewards: Sequence[SelectedReward],
    *,
    num_prompts: int | None,
    sampling: SamplingParams,
    engine: str,
    device: str,
) -> dict[str, float]:
    """Mean of each reward (by its label) over the answers to a JSON Lines file of prompts, and `num_prompts`."""
    context = reward_context(device, seed=0, model_path=model)
    specs = [
        # There is no run folder to remember scores in, and each answer is scored once.
        reward_spec(r.selected, r.config, context, r.call_options.without_cache(), name=r.name, weight=r.weight)
        for r in rewards
    ]
    with closing(RewardScorer(specs)) as scorer:
        answering, tokenizer = _open(model, engine, 0, device)
        with closing(answering):
            maker = PolicyExperienceMaker(
                player=SingleAnswers(answering, tokenizer, sampling),
                samples_per_prompt=1,
                scorer=scorer,
                hooks=HookRelay(),
            )
            prompts = _read_prompts(prompts_file, tokenizer, num_prompts)
            rows = [item.rewards for group in maker.make(prompts) for item in group.items]
    means = {name: sum(row[name] for row in rows) / max(1, len(rows)) for name in scorer.weights}
    return {**means, "num_prompts": float(len(prompts)), "num_scored": float(len(rows))}


def _open(model: str, engine: str, seed: int, device: str) -> tuple[RolloutEngine, PreTrainedTokenizerBase]:
    import torch

    config = ModelConfig(path=model, device=device)
    check_model(config)
    selected = load("engines", engine)
    tokenizer = load_tokenizer(config)
    place = own_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    policy = load_policy(config, dtype=dtype, seed=seed, tokenizer=tokenizer).to(place).eval()  # type: ignore[arg-type]
    context = engine_context(policy, tokenizer, device=place, seed=seed, model_path=model, compute_dtype=None)
    built = resolve_build(selected)(selected.component.config(), context)
    return cast(RolloutEngine, built), tokenizer


def _read_prompts(path: str, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Prompt]:
    selected = load("prompts", "jsonl")
    config = selected.component.config.model_validate({"path": path})
    source = resolve_build(selected)(config, prompts_context(seed=0))
    encoder = PromptEncoder(tokenizer)
    count = len(source) if limit is None else min(limit, len(source))
    return [encoder.prompt(source[i], i, f"{path}, record {i + 1}") for i in range(count)]
