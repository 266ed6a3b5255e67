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
from rlhf_forward import mask_from_lengths, own_lengths, scores_at
from rlhf_models import load_tokenizer

from .config import ModelRewardConfig
from .encoding import RolloutEncoder, Sample, same_tokenizer
from .loading import load, place
from .steps import StepEncoder, by_turn, combined, has_turns


def build(config: ModelRewardConfig, context: RewardContext) -> Reward:
    """Load the model. Raises `UserInputError` where it cannot score."""
    device, dtype = place(context.device if config.device == "auto" else config.device, config.dtype)
    tokenizer, model, label = load(config.path, dtype, config.label_index)
    shared = context.model_path is not None and same_tokenizer(
        load_tokenizer(ModelConfig(path=context.model_path)), tokenizer
    )
    limit = _limit_tokens(model, tokenizer.model_max_length, config.max_tokens)
    pools_itself = not reads_last_token(model)
    if config.steps is None:
        encoder = RolloutEncoder(
            tokenizer, config, same_tokenizer=shared, limit_tokens=limit, pools_itself=pools_itself
        )
    elif pools_itself:
        raise UserInputError(
            f"{config.path!r} does not read single tokens, as a process reward model does",
            where='reward "model": steps',
            hint="train one: rlhf train --algorithm process-reward-model",
        )
    else:
        encoder = StepEncoder(tokenizer, config, same_tokenizer=shared, limit_tokens=limit)
    return ModelReward(model, config, encoder, label=label, device=device)


def _limit_tokens(model: PreTrainedModel, tokenizer_limit: int, asked: int | None) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (asked, positions, tokenizer_limit) if isinstance(limit, int) and limit > 0]
    return min(limits)


def reads_last_token(model: nn.Module) -> bool:
    """True for the decoder family, whose linear head `score` is meant for the last token's hidden state."""
    return isinstance(getattr(model, "score", None), nn.Linear)


class ModelReward:
    """Scores samples by one model; calls from several threads take turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ModelRewardConfig,
        encoder: RolloutEncoder,
        *,
        label: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._config = config
        self._encoder = encoder
        self._label = label
        self._device = device
        self._lock = threading.Lock()
        if not config.offload:
            model.to(device)  # type: ignore[arg-type]

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | Mapping[int, float]]:
        """Each sample's logit, or with `steps` the combined chance that they are right, 0 to 1.

        Raises `ValueError` naming a bad sample.
        """
        found, how = self.logits(rollouts), self._config.steps
        if how is None:
            return [logit for (logit,) in found]
        return [
            by_turn(steps) if how == "turns" and has_turns(rollout) else combined(steps, how)
            for steps, rollout in zip(found, rollouts, strict=True)
        ]

    def logits(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """The logit of the label at each place that is read of each sample."""
        samples = [self._encoder.encode(rollout) for rollout in rollouts]
        found: list[list[float]] = [[] for _ in samples]
        read = [index for index, sample in enumerate(samples) if sample.places]
        batches = plan_micro_batches([len(samples[index].ids) for index in read], self._config.max_batch_tokens)
        with self._lock, self._on_device(), torch.inference_mode():
            for batch in batches:
                rows = [samples[read[index]] for index in batch]
                logits = classify(self._model, rows, self._device)[:, self._label]
                for index, own in zip(batch, logits.split([len(row.places) for row in rows]), strict=True):
                    found[read[index]] = own.tolist()
        return found

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._config.offload:
            yield
            return
        self._model.to(self._device)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self._model.to("cpu")  # type: ignore[arg-type]
            if self._device.type == "cuda":
                torch.cuda.empty_cache()


def classify(model: PreTrainedModel, samples: Sequence[Sample], device: torch.device) -> Tensor:
    """[N, labels] float32: the logits at the N places, row by row; models that pool have one a row, their own."""
    rows = [torch.tensor(sample.ids) for sample in samples]
    if reads_last_token(model):
        return scores_at(model, rows, [sample.places for sample in samples], device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    with own_lengths(model, lengths[:, None]):
        output = model(input_ids=ids, attention_mask=mask_from_lengths(lengths, ids.shape[1]).long())
    return output.logits.float()  # type: ignore[no-any-return]
