"""The reward `model`: forward passes of a sequence classifier over prompts and answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.batching import plan_micro_batches
from rlhf_core.components import RewardContext
from rlhf_core.config import ModelConfig
from rlhf_core.models import last_token_scores, own_lengths
from rlhf_core.models import load_tokenizer as load_policy_tokenizer
from rlhf_core.protocols import Reward
from rlhf_core.types import Rollout

from .config import ModelRewardConfig
from .encoding import RolloutEncoder, same_tokenizer
from .loading import load_model, load_tokenizer, place


def build(config: ModelRewardConfig, context: RewardContext) -> Reward:
    """Load the model. Raises `UserInputError` where it cannot score."""
    device, dtype = place(context.device if config.device == "auto" else config.device, config.dtype)
    tokenizer = load_tokenizer(config.path)
    model, label = load_model(config.path, dtype, config.label_index)
    shared = context.model_path is not None and same_tokenizer(
        load_policy_tokenizer(ModelConfig(path=context.model_path)), tokenizer
    )
    encoder = RolloutEncoder(
        tokenizer,
        encoding=config.encoding,
        same_tokenizer=shared,
        pools_itself=not reads_last_token(model),
        limit_tokens=_limit_tokens(model, tokenizer.model_max_length, config.max_tokens),
        cut=config.too_long == "cut",
        append_eos=config.append_eos,
    )
    return ModelReward(
        model,
        encoder,
        label=label,
        device=device,
        max_batch_tokens=1 if config.batch_invariant else config.max_batch_tokens,
        offload=config.offload,
    )


def _limit_tokens(model: PreTrainedModel, tokenizer_limit: int, asked: int | None) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (asked, positions, tokenizer_limit) if isinstance(limit, int) and limit > 0]
    return min(limits)


def reads_last_token(model: nn.Module) -> bool:
    """True for the decoder family, whose linear head `score` is meant for the last token's hidden state."""
    return isinstance(getattr(model, "score", None), nn.Linear)


class ModelReward:
    """Scores samples with one model; calls from several threads take turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: RolloutEncoder,
        *,
        label: int,
        device: torch.device,
        max_batch_tokens: int,
        offload: bool,
    ) -> None:
        self._model = model
        self._encoder = encoder
        self._label = label
        self._device = device
        self._max_batch_tokens = max_batch_tokens
        self._offload = offload
        self._lock = threading.Lock()
        if not offload:
            model.to(device)  # type: ignore[arg-type]

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The logit of the label, at each sample's last real token. Raises `ValueError` naming a bad sample."""
        with self._lock:
            sequences = self._encoder.encode(rollouts)
            scores = [0.0] * len(sequences)
            with self._on_device(), torch.inference_mode():
                for batch in plan_micro_batches([len(ids) for ids in sequences], self._max_batch_tokens):
                    logits = classify(self._model, [sequences[index] for index in batch], self._device)
                    for index, score in zip(batch, logits[:, self._label].tolist(), strict=True):
                        scores[index] = score
        return scores

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        self._model.to(self._device)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self._model.to("cpu")  # type: ignore[arg-type]
            if self._device.type == "cuda":
                torch.cuda.empty_cache()


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
