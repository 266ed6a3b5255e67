"""The reward `model`: forward passes of a sequence classifier over prompts and answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.batching import plan_micro_batches
from rlhf_core.components import RewardContext
from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_core.protocols import Reward
from rlhf_core.types import Rollout
from rlhf_forward import last_token_scores, own_lengths, scores_at
from rlhf_models import load_tokenizer as load_policy_tokenizer

from .config import ModelRewardConfig
from .encoding import RolloutEncoder, same_tokenizer
from .loading import load_model, load_tokenizer, place
from .steps import Combine, StepEncoder, by_turn, combined, has_turns


def build(config: ModelRewardConfig, context: RewardContext) -> Reward:
    """Load the model. Raises `UserInputError` where it cannot score."""
    device, dtype = place(context.device if config.device == "auto" else config.device, config.dtype)
    tokenizer = load_tokenizer(config.path)
    model, label = load_model(config.path, dtype, config.label_index)
    shared = context.model_path is not None and same_tokenizer(
        load_policy_tokenizer(ModelConfig(path=context.model_path)), tokenizer
    )
    limit = _limit_tokens(model, tokenizer.model_max_length, config.max_tokens)
    places = _Places(
        model,
        label=label,
        device=device,
        max_batch_tokens=1 if config.batch_invariant else config.max_batch_tokens,
        offload=config.offload,
    )
    if config.steps is not None:
        if not reads_last_token(model):
            raise UserInputError(
                f"{config.path!r} does not read single tokens, as a process reward model does",
                where='reward "model": steps',
                hint="train one: rlhf train --algorithm process-reward-model",
            )
        steps = StepEncoder(tokenizer, separator=config.step_separator, same_tokenizer=shared, limit_tokens=limit)
        return StepReward(places, steps, config.steps)
    encoder = RolloutEncoder(
        tokenizer,
        encoding=config.encoding,
        same_tokenizer=shared,
        pools_itself=not reads_last_token(model),
        limit_tokens=limit,
        cut=config.too_long == "cut",
        append_eos=config.append_eos,
    )
    return ModelReward(places, encoder)


def _limit_tokens(model: PreTrainedModel, tokenizer_limit: int, asked: int | None) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (asked, positions, tokenizer_limit) if isinstance(limit, int) and limit > 0]
    return min(limits)


def reads_last_token(model: nn.Module) -> bool:
    """True for the decoder family, whose linear head `score` is meant for the last token's hidden state."""
    return isinstance(getattr(model, "score", None), nn.Linear)


class _Places:
    """One model where it is run; calls from several threads take turns."""

    def __init__(
        self, model: PreTrainedModel, *, label: int, device: torch.device, max_batch_tokens: int, offload: bool
    ) -> None:
        self.model = model
        self.label = label
        self.device = device
        self._max_batch_tokens = max_batch_tokens
        self._offload = offload
        self._lock = threading.Lock()
        if not offload:
            model.to(device)  # type: ignore[arg-type]

    @contextmanager
    def batches(self, lengths: Sequence[int]) -> Iterator[list[list[int]]]:
        """Indices of what goes through together, while the model is on its device."""
        with self._lock, self._on_device(), torch.inference_mode():
            yield plan_micro_batches(lengths, self._max_batch_tokens)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        self.model.to(self.device)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self.model.to("cpu")  # type: ignore[arg-type]
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


class ModelReward:
    """Scores samples with one number of the model each."""

    def __init__(self, places: _Places, encoder: RolloutEncoder) -> None:
        self._places = places
        self._encoder = encoder

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The logit of the label, at each sample's last real token. Raises `ValueError` naming a bad sample."""
        places = self._places
        sequences = self._encoder.encode(rollouts)
        scores = [0.0] * len(sequences)
        with places.batches([len(ids) for ids in sequences]) as batches:
            for batch in batches:
                logits = classify(places.model, [sequences[index] for index in batch], places.device)
                for index, score in zip(batch, logits[:, places.label].tolist(), strict=True):
                    scores[index] = score
        return scores


class StepReward:
    """Scores samples with the model's numbers at the end of each step."""

    def __init__(self, places: _Places, encoder: StepEncoder, how: Combine) -> None:
        self._places = places
        self._encoder = encoder
        self._how = how

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | Mapping[int, float]]:
        """The combined chance that the steps are right, 0 to 1. Raises `ValueError` naming a bad sample."""
        scores = zip(self.step_scores(rollouts), rollouts, strict=True)
        return [self._score(steps, has_turns(rollout)) for steps, rollout in scores]

    def _score(self, steps: Sequence[float], has_turns: bool) -> float | Mapping[int, float]:
        return by_turn(steps) if has_turns and self._how == "turns" else combined(steps, self._how)

    def step_scores(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """The logit of the label at the end of each step of each sample."""
        places = self._places
        samples = [self._encoder.encode(rollout) for rollout in rollouts]
        found: list[list[float]] = [[] for _ in samples]
        stepped = [index for index, sample in enumerate(samples) if sample.ends]
        with places.batches([len(samples[index].ids) for index in stepped]) as batches:
            for batch in batches:
                rows = [samples[stepped[index]] for index in batch]
                ids = [torch.tensor(row.ids) for row in rows]
                logits = scores_at(places.model, ids, [row.ends for row in rows], places.device)[:, places.label]
                for index, scores in zip(batch, logits.split([len(row.ends) for row in rows]), strict=True):
                    found[stepped[index]] = scores.tolist()
        return found


def classify(model: PreTrainedModel, sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, labels] float32: the logits of each sequence; a decoder's at its last token, other models pool as they do."""
    if reads_last_token(model):
        return last_token_scores(model, [torch.tensor(ids) for ids in sequences], device)
    lengths = torch.tensor([len(ids) for ids in sequences], device=device)
    width = int(lengths.max())
    input_ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences], device=device)
    mask = (torch.arange(width, device=device) < lengths[:, None]).long()
    with own_lengths(model, lengths[:, None]):
        return model(input_ids=input_ids, attention_mask=mask).logits.float()  # type: ignore[no-any-return]
