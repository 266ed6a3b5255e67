"""The teacher: a frozen model of its own that says how likely it finds the tokens the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..algorithm import Teacher
from ..config.sections import ModelConfig
from ..errors import UserInputError
from .forward import policy_forward
from .loading import check_model, load_policy, load_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..strategy import Strategy
    from ..types import Experience

WHERE = "algorithm.teacher"


@dataclass(frozen=True, slots=True)
class TeacherModel:
    """A teacher, placed where it is run."""

    model: nn.Module
    top_k: int
    """As `Teacher.top_k`."""
    vocabulary: int
    """Only ids below this are given: those that the policy's tokenizer knows."""
    offload: bool = False


def check_teacher(teacher: Teacher, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserInputError` where the model cannot be, or its tokens are not those of the policy's `tokenizer`.

    What is compared is which text each id of the policy stands for: the teacher is given ids and encodes nothing.
    """
    config = ModelConfig(path=teacher.path)
    try:
        check_model(config)
        its = load_tokenizer(config).get_vocab()
    except UserInputError as error:
        raise UserInputError(error.message, where=f"{WHERE}.path", hint=error.hint) from error
    ours = tokenizer.get_vocab()
    different = [token for token in sorted(ours, key=ours.__getitem__) if its.get(token) != ours[token]]
    if different:
        token = different[0]
        raise UserInputError(
            f"{teacher.path!r} has another tokenizer than the policy: {len(different)} of the policy's {len(ours)} "
            f"tokens differ, the first is {token!r}: {ours[token]} here, {its.get(token, 'absent')} there",
            where=f"{WHERE}.path",
            hint="take a teacher of the policy's own family, whose tokens are the same",
        )
    if teacher.top_k > len(ours):
        raise UserInputError(f"is {teacher.top_k}, the tokenizer has {len(ours)} tokens", where="algorithm.top_k")


def load_teacher(
    teacher: Teacher, policy: ModelConfig, *, dtype: torch.dtype, seed: int
) -> tuple[PreTrainedModel, int]:
    """The model on the CPU, and the number of tokens that the policy's tokenizer knows."""
    try:
        model = load_policy(ModelConfig(path=teacher.path), dtype=dtype, seed=seed)
    except UserInputError as error:
        raise UserInputError(error.message, where=f"{WHERE}.path", hint=error.hint) from error
    return model, len(load_tokenizer(policy))


def teacher_forward(teacher: TeacherModel, batch: Experience, *, temperature: float) -> Tensor:
    """[B, A, K, 1] float32 log-probs; with `top_k` [B, A, K, 2], ids behind them, which float32 holds exactly."""
    import torch

    if not teacher.top_k:
        return policy_forward(teacher.model, batch, temperature).log_probs[..., None, None]

    def likeliest(logits: Tensor) -> Tensor:
        best = logits[:, : teacher.vocabulary].topk(teacher.top_k, dim=-1)
        log_probs = best.values - logits.logsumexp(-1, keepdim=True)
        return torch.stack([log_probs, best.indices.float()], dim=-1)

    read = policy_forward(teacher.model, batch, temperature, read=likeliest).read
    assert read is not None
    return read


def teacher_fields(found: Tensor) -> dict[str, Any]:
    """`teacher_forward` of rows as the fields of an item (or of a batch)."""
    import torch

    log_probs = found[..., 0]
    if found.shape[-1] == 1:
        return {"teacher_log_probs": log_probs}
    return {"teacher_log_probs": log_probs, "teacher_ids": found[..., 1].to(torch.int32)}


def place_teacher(
    teacher: Teacher, policy: ModelConfig, strategy: Strategy, *, dtype: torch.dtype, seed: int
) -> TeacherModel:
    """The teacher, frozen and where `strategy` puts models. `dtype`: the one that `auto` stands for."""
    import torch

    chosen = dtype if teacher.dtype == "auto" else getattr(torch, teacher.dtype)
    with strategy.model_init_context():
        model, vocabulary = load_teacher(teacher, policy, dtype=chosen, seed=seed)
    return TeacherModel(
        strategy.prepare_inference(model),
        top_k=teacher.top_k,
        vocabulary=vocabulary,
        offload=teacher.offload and not strategy.shards_parameters,
    )
