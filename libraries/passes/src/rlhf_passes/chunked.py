"""Log-probs and entropy straight from hidden states, without all logits in memory at once.

For T tokens and a vocabulary of V, the plain path holds several T x V float32 tensors; here at most
`chunk_tokens` x V of them live, forward and backward. The backward pass computes each chunk's logits again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_forward.logprobs import LEAST_LOGIT, Temperature, rows_of

from .fast_linear import multiply
from .vocabulary_gradients import total_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LogProbsAndEntropy(NamedTuple):
    """Both in the labels' shape, float32, nats."""

    log_probs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The rows of a head that this process holds; the others of `group`, which have the same tokens, hold the rest.

    Three numbers a token are exchanged for the distribution over all of them, not its logits.
    """

    start: int
    group: ProcessGroup

    def sum(self, tensor: Tensor) -> Tensor:
        """Over the processes, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def normalisers(self, own: Tensor) -> Tensor:
        """The logsumexp of all logits, from that of each process's."""
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest + self.sum((own - largest).exp()).log()

    def own_labels(self, labels: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Each label's row in this process (0 where another holds it), and whether it is here."""
        rows = labels - self.start
        is_here = (rows >= 0) & (rows < num_rows)
        return rows.masked_fill(~is_here, 0), is_here


def chunked_log_probs_and_entropy(
    hidden: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    temperature: Temperature = 1.0,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    part: VocabularyPart | None = None,
    *,
    direct: bool = False,
) -> LogProbsAndEntropy:
    """`token_log_probs` and `entropy` of `hidden @ lm_head_weight.T + bias`, and the same gradients.

    hidden: [..., H]; lm_head_weight: [V, H]; labels: [...] int64; temperature: one, or [..., 1]; bias: [V]. The
    products are taken in the dtype of `hidden` (or autocast's), everything after them in float32; the weight's gradient
    is summed over chunks in float32. With `part` the weight and bias are this process's rows, the labels those of the
    whole vocabulary.
    direct: the weight's gradient is added to its `.grad` (`direct_gradients`).
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    weight = lm_head_weight.to(hidden.dtype)
    flat = hidden.reshape(-1, hidden.shape[-1])
    log_probs, entropy = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        flat,
        weight,
        bias,
        labels.reshape(-1),
        temperature.reshape(-1, 1) if isinstance(temperature, Tensor) else temperature,
        chunk_tokens,
        with_entropy,
        part,
        direct and weight is lm_head_weight,
    )
    return LogProbsAndEntropy(log_probs.view(labels.shape), entropy.view(labels.shape) if with_entropy else None)


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Temperature) -> Tensor:
    logits = multiply(hidden, weight.T)
    if bias is not None:
        logits += bias.to(logits.dtype)
    return logits.float().div_(temperature)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Temperature,
        chunk_tokens: int,
        with_entropy: bool,
        part: VocabularyPart | None,
        direct: bool,
    ) -> tuple[Tensor, Tensor]:
        is_here = None
        if part is not None:
            labels, is_here = part.own_labels(labels, weight.shape[0])
        normalisers = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        chosen = torch.empty_like(normalisers)
        means = torch.empty_like(normalisers)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, labels.numel(), chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                logits = _chunk_logits(hidden[chunk], weight, bias, rows_of(temperature, chunk))
                normalisers[chunk] = logits.logsumexp(-1)
                chosen[chunk] = logits.gather(-1, labels[chunk, None])[:, 0]
                if with_entropy:
                    means[chunk] = (logits.softmax(-1) * logits.clamp(min=LEAST_LOGIT)).sum(-1)
        if part is not None and is_here is not None:
            own, normalisers = normalisers, part.normalisers(normalisers)
            chosen = part.sum(chosen.where(is_here, 0.0))
            if with_entropy:
                means = part.sum(means * (own - normalisers).exp())
        entropies = normalisers - means if with_entropy else torch.zeros_like(normalisers)
        ctx.save_for_backward(hidden, weight, bias, labels, is_here, normalisers, entropies)
        ctx.temperature, ctx.chunk_tokens, ctx.with_entropy, ctx.part = temperature, chunk_tokens, with_entropy, part
        ctx.direct_weight = weight if direct else None
        return chosen - normalisers, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_grads: Tensor, entropy_grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, is_here, normalisers, entropies = ctx.saved_tensors
        of_labels = log_prob_grads if is_here is None else log_prob_grads.where(is_here, 0.0)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = None
        if needs_weight and ctx.direct_weight is not None:
            weight_grad = total_gradient(ctx.direct_weight)
        elif needs_weight:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, labels.numel(), ctx.chunk_tokens):
                chunk = slice(start, start + ctx.chunk_tokens)
                of_rows = rows_of(ctx.temperature, chunk)
                logits = _chunk_logits(hidden[chunk], weight, bias, of_rows)
                log_all = logits.sub_(normalisers[chunk, None])
                # d log p_label = onehot - p;  d entropy = -p (log p + entropy)
                grads = log_all.exp().mul_(-log_prob_grads[chunk, None])
                if ctx.with_entropy:
                    finite = log_all.clamp(min=LEAST_LOGIT)
                    slope = (finite + entropies[chunk, None]) * entropy_grads[chunk, None]
                    grads.sub_(log_all.exp_().mul_(slope))
                grads.scatter_add_(-1, labels[chunk, None], of_labels[chunk, None])
                grads.div_(of_rows)
                if bias_grad is not None:
                    bias_grad += grads.sum(0)
                narrow = grads.to(weight.dtype)
                if hidden_grad is not None:
                    hidden_grad[chunk] = multiply(narrow, weight)
                if weight_grad is not None:
                    _add_product(weight_grad, narrow.T, hidden[chunk])
        if hidden_grad is not None and ctx.part is not None:
            hidden_grad = ctx.part.sum(hidden_grad)
        return (
            hidden_grad,
            None if weight_grad is None or ctx.direct_weight is not None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a second tensor of its size where the types allow it."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
