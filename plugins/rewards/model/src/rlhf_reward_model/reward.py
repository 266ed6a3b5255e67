"""The reward `model`: scores prompts and answers by forward passes of a sequence classifier."""

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
from .encoding import EncodedSample, RolloutEncoder, same_tokenizer
from .loading import load, place
from .steps import StepEncoder, by_turn, combine, has_turns


def build(config: ModelRewardConfig, context: RewardContext) -> Reward:
    """Load the model and return the reward. Raises `UserInputError` if the model cannot score."""
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
            f"{config.path!r} does not read single tokens, as a process reward model must",
            where='reward "model": steps',
            hint="train one: rlhf train --algorithm process-reward-model",
        )
    else:
        encoder = StepEncoder(tokenizer, config, same_tokenizer=shared, limit_tokens=limit)
    return ModelReward(model, config, encoder, label=label, device=device)


def _limit_tokens(model: PreTrainedModel, tokenizer_limit: int, max_tokens: int | None) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (max_tokens, positions, tokenizer_limit) if isinstance(limit, int) and limit > 0]
    return min(limits)


def reads_last_token(model: nn.Module) -> bool:
    """Whether this is a decoder, whose linear head `score` is applied to the last token's hidden state."""
    return isinstance(getattr(model, "score", None), nn.Linear)


class ModelReward:
    """Scores samples by one model. A lock serializes calls from several threads."""

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
        """Score samples: each one's logit, or with `steps` the combined probability in [0, 1] that its steps are right.

        With `steps: turns`, an episode of several turns gets a score per turn. Raises `ValueError`, which names the
        sample, if one cannot be encoded.
        """
        all_logits, method = self.logits(rollouts), self._config.steps
        if method is None:
            return [logit for (logit,) in all_logits]
        return [
            by_turn(logits) if method == "turns" and has_turns(rollout) else combine(logits, method)
            for logits, rollout in zip(all_logits, rollouts, strict=True)
        ]

    def logits(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Logits of the label at the positions of each sample."""
        samples = [self._encoder.encode(rollout) for rollout in rollouts]
        all_logits: list[list[float]] = [[] for _ in samples]
        read = [index for index, sample in enumerate(samples) if sample.positions]
        batches = plan_micro_batches([len(samples[index].ids) for index in read], self._config.max_batch_tokens)
        with self._lock, self._on_device(), torch.inference_mode():
            for batch in batches:
                rows = [samples[read[index]] for index in batch]
                logits = classify(self._model, rows, self._device)[:, self._label]
                for index, part in zip(batch, logits.split([len(row.positions) for row in rows]), strict=True):
                    all_logits[read[index]] = part.tolist()
        return all_logits

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


def classify(model: PreTrainedModel, samples: Sequence[EncodedSample], device: torch.device) -> Tensor:
    """Logits at the N positions of all samples, row by row: [N, labels] float32. Models that pool have one per row."""
    rows = [torch.tensor(sample.ids) for sample in samples]
    if reads_last_token(model):
        return scores_at(model, rows, [sample.positions for sample in samples], device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    with own_lengths(model, lengths[:, None]):
        output = model(input_ids=ids, attention_mask=mask_from_lengths(lengths, ids.shape[1]).long())
    return output.logits.float()  # type: ignore[no-any-return]
