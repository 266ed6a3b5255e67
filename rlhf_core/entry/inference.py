"""Answers and scores from a model folder, outside a run: `rlhf generate` and `rlhf eval`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..build import build_environment_player
from ..config.sections import ModelConfig
from ..config.selected import SelectedEnvironment, SelectedReward
from ..contexts import engine_context, own_device, prompts_context, reward_context
from ..environments.metrics import ENVIRONMENT, environment_metrics
from ..hooks.relay import HookRelay
from ..models.loading import check_model, load_policy, load_tokenizer
from ..plugins.discovery import load, resolve_build
from ..prompts.stream import PromptEncoder
from ..prompts.tasks import Tasks
from ..protocols import PromptSource, RolloutEngine
from ..rewards.scorer import RewardScorer, reward_spec
from ..rollout.maker import Player, PolicyExperienceMaker
from ..rollout.samples import rewards_of, rollout_of
from ..rollout.single_answer import SingleAnswers
from ..runfolder.samples import SampleRecord
from ..types import GenerationRequest, PhaseTimes, Prompt, SamplingParams
from ..util.weight_files import load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TASKS = 64
"""Episodes of an evaluation that is given neither prompts nor a number."""


def generate_text(
    model: str, prompts: Sequence[str], *, engine: str, sampling: SamplingParams, seed: int, device: str
) -> list[str]:
    """A completion of each prompt. A tokenizer with a chat template gets the prompt as a user message."""
    answering, tokenizer = open_engine(ModelConfig(path=model, device=device), engine, seed)
    with closing(answering):
        encoder = PromptEncoder(tokenizer, text_as_chat=bool(tokenizer.chat_template))
        encoded = [encoder.prompt({"prompt": text}, i, f"prompt {i + 1}") for i, text in enumerate(prompts)]
        requests = [GenerationRequest(sample_id=p.position, prompt_ids=p.prompt_ids) for p in encoded]
        answers = {done.sample_id: list(done.token_ids) for done in answering.generate(requests, sampling)}
    return [str(tokenizer.decode(answers[p.position], skip_special_tokens=True)) for p in encoded]


def play_text(
    model: str,
    prompts: Sequence[str],
    environment: SelectedEnvironment,
    *,
    engine: str,
    sampling: SamplingParams,
    seed: int,
    device: str,
) -> list[dict[str, Any]]:
    """An episode for each prompt, or one of a task without a prompt, as lines of `samples.jsonl`: one for each branch.

    seed: of the tasks and of sampling. Raises `EpisodeError` where an episode fails.
    """
    answering, tokenizer = open_engine(ModelConfig(path=model, device=device), engine, seed)
    with closing(answering):
        player = build_environment_player(environment, answering, tokenizer, sampling=sampling, seed=seed)
        encoder = PromptEncoder(tokenizer, text_as_chat=bool(prompts and tokenizer.chat_template))
        encoded = [encoder.prompt({"prompt": text}, i, f"prompt {i + 1}") for i, text in enumerate(prompts or [""])]
        with closing(player):
            played = player.play([(prompt, prompt.position) for prompt in encoded], PhaseTimes())
            episodes = sorted(played, key=lambda each: each.sample_id)
    return [
        SampleRecord.of(
            rollout_of(row, each), episode=0, rewards=rewards_of(each, {}), score=each.reward, plays=True
        ).to_json()
        for each in episodes
        for row in each.rows
    ]


def evaluate_folder(
    model: str,
    prompts_file: str | None,
    rewards: Sequence[SelectedReward],
    *,
    num_prompts: int | None,
    sampling: SamplingParams,
    engine: str,
    device: str,
    environment: SelectedEnvironment | None = None,
) -> dict[str, float]:
    """Over the answers to a JSON Lines file of prompts: the mean `weighted_score`, and of each reward (by its label).

    With `num_prompts`, how many there were.

    With an environment an episode is played for each prompt, or for `num_prompts` tasks without one (64 where that is
    None); the environment's reward comes first, and its metrics follow.
    """
    context = reward_context(device, seed=0, model_path=model)
    specs = [
        # There is no run folder to remember scores in, and each answer is scored once.
        reward_spec(r.selected, r.config, context, r.call_options.without_cache(), name=r.name, weight=r.weight)
        for r in rewards
    ]
    with closing(RewardScorer(specs, may_be_empty=environment is not None)) as scorer:
        answering, tokenizer = open_engine(ModelConfig(path=model, device=device), engine, 0)
        with closing(answering):
            maker = PolicyExperienceMaker(
                player=_player(environment, answering, tokenizer, sampling),
                samples_per_prompt=1,
                scorer=scorer,
                hooks=HookRelay(),
            )
            with closing(maker):
                prompts = _read_prompts(prompts_file, tokenizer, num_prompts)
                items = [item for group in maker.make(prompts) for item in group.items if item.branch == 0]
    names = [*([] if environment is None else [ENVIRONMENT]), *scorer.weights]
    means = {name: sum(item.rewards[name] for item in items) / max(1, len(items)) for name in names}
    weights = {ENVIRONMENT: 1.0 if environment is None else environment.options.weight, **scorer.weights}
    score = {"weighted_score": sum(weights[name] * mean for name, mean in means.items())}
    counts = {"num_prompts": float(len(prompts)), "num_scored": float(len(items))}
    return {**means, **score, **environment_metrics(items), **counts}


def _player(
    environment: SelectedEnvironment | None,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
) -> Player:
    if environment is None:
        return SingleAnswers(engine, tokenizer, sampling)
    return build_environment_player(
        environment, engine, tokenizer, sampling=sampling, seed=0, purpose="evaluation-task"
    )


def open_engine(
    config: ModelConfig, engine: str, seed: int, *, weights: Path | None = None
) -> tuple[RolloutEngine, PreTrainedTokenizerBase]:
    """An engine over a model that is loaded for it. weights: of a checkpoint, in place of the model's own."""
    import torch

    check_model(config)
    selected = load("engines", engine)
    tokenizer = load_tokenizer(config)
    place = own_device(config.device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    policy = load_policy(config, dtype=dtype, seed=seed, tokenizer=tokenizer)
    if weights is not None:
        load_weights(policy, weights)
    policy = policy.to(place).eval()  # type: ignore[arg-type]
    context = engine_context(policy, tokenizer, device=place, seed=seed, model_path=config.path, compute_dtype=None)
    built = resolve_build(selected)(selected.component.config(), context)
    return cast(RolloutEngine, built), tokenizer


def _read_prompts(path: str | None, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Prompt]:
    """Those of a file, or as many tasks without a prompt."""
    source: PromptSource = Tasks(limit or _TASKS)
    if path is not None:
        selected = load("prompts", "jsonl")
        config = selected.component.config.model_validate({"path": path})
        source = resolve_build(selected)(config, prompts_context(seed=0))
    encoder = PromptEncoder(tokenizer)
    count = len(source) if limit is None else min(limit, len(source))
    return [encoder.prompt(source[i], i, f"{path}, record {i + 1}") for i in range(count)]
