"""Log-probs and entropy computed from hidden states, without all logits in memory at once.

For T tokens and a vocabulary of V, the plain path holds several float32 tensors of T x V logits. Here they have at most
`chunk_tokens` x V, for chunks of tokens in the forward and of the vocabulary in the backward, which recomputes logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_forward.logprobs import LEAST_LOGIT, Temperature, rows_of

from .fast_linear import multiply
from .mixed_linear import narrow_copy
from .vocabulary_gradients import total_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """This process's rows of a language-model head. The other processes of `group` hold the rest.

    All processes of the group have the same tokens. They exchange three numbers per token for the distribution over
    the whole vocabulary, not its logits.
    """

    start: int
    """Vocabulary index of this process's first row."""
    group: ProcessGroup

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def normalisers(self, own: Tensor) -> Tensor:
        """Logsumexp over the whole vocabulary, [N], from each process's logsumexp `own`, [N]."""
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest + self.sum((own - largest).exp()).log()

    def own_labels(self, labels: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Each label's row in this process (0 if another process holds it), and whether it is held here, [N] each."""
        rows = labels - self.start
        is_here = (rows >= 0) & (rows < num_rows)
        return rows.masked_fill(~is_here, 0), is_here


@dataclass(frozen=True, slots=True)
class Chunked:
    """Options for computing log-probs and entropy from hidden states."""

    chunk_tokens: int = 1024
    """Maximum number of tokens whose logits are held at a time."""
    temperature: Temperature = 1.0
    """A number, or a tensor [N, 1]."""
    with_entropy: bool = False
    part: VocabularyPart | None = None
    """Rows of the vocabulary that weight and bias hold, None for all."""
    direct: bool = False
    """Whether to add the weight's gradient to its `.grad` directly (`direct_gradients`)."""

    def of(self, hidden: Tensor, head: Tensor, labels: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy of `hidden @ head.T + bias`, as `token_log_probs` and `entropy` compute them.

        Products are computed in the dtype of `hidden` (or autocast's), everything after them in float32. The weight's
        gradient is summed over chunks in float32.

        Args:
            hidden: [N, H] hidden states.
            head: [V, H] weight of the head.
            labels: [N] int64 indices into the whole vocabulary.
            bias: [V] bias of the head, or None.

        Returns:
            [N] float32 log-probs of the labels and [N] float32 entropies, in nats. Entropies are 0 unless
            `with_entropy` is set.
        """
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            hidden = hidden.to(torch.get_autocast_dtype(device_type))
        copy = narrow_copy(head)
        weight = head if copy is not None else head.to(hidden.dtype)
        options = self if weight is head else replace(self, direct=False)
        result: tuple[Tensor, Tensor] = _ChunkedHead.apply(hidden, weight, bias, labels, options, copy)  # type: ignore[no-untyped-call]
        return result

    def logits(self, rows: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits [n, B] float32 of `rows` of `hidden` for a block of the vocabulary, divided by the temperature."""
        logits = multiply(hidden[rows], weight.T)
        if bias is not None:
            logits += bias.to(logits.dtype)
        return logits.float().div_(rows_of(self.temperature, rows))

    def chunks(self, labels: Tensor) -> list[slice]:
        """Slices of rows, each computed in one step."""
        return [slice(start, start + self.chunk_tokens) for start in range(0, labels.numel(), self.chunk_tokens)]

    def blocks(self, labels: Tensor, num_words: int) -> list[slice]:
        """Slices of the vocabulary, each computed in one step for all rows, with about as many logits as a chunk."""
        size = max(1, self.chunk_tokens * num_words // max(1, labels.numel()))
        return [slice(start, min(start + size, num_words)) for start in range(0, num_words, size)]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: Chunked,
        copy: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`copy`: the weight in the type of `hidden`, if it is narrower."""
        used = weight if copy is None else copy
        part, is_here = options.part, None
        if part is not None:
            labels, is_here = part.own_labels(labels, weight.shape[0])
        normalisers = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        chosen = torch.empty_like(normalisers)
        means = torch.empty_like(normalisers)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in options.chunks(labels):
                logits = options.logits(chunk, hidden, used, bias)
                normalisers[chunk] = logits.logsumexp(-1)
                chosen[chunk] = logits.gather(-1, labels[chunk, None])[:, 0]
                if options.with_entropy:
                    means[chunk] = (logits.softmax(-1) * logits.clamp(min=LEAST_LOGIT)).sum(-1)
        if part is not None and is_here is not None:
            own, normalisers = normalisers, part.normalisers(normalisers)
            chosen = part.sum(chosen.where(is_here, 0.0))
            if options.with_entropy:
                means = part.sum(means * (own - normalisers).exp())
        entropies = normalisers - means if options.with_entropy else torch.zeros_like(normalisers)
        ctx.save_for_backward(hidden, used, bias, labels, is_here, normalisers, entropies)
        ctx.options, ctx.direct_weight, ctx.dtype = options, weight if options.direct else None, weight.dtype
        return chosen - normalisers, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_grads: Tensor, entropy_grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, is_here, normalisers, entropies = ctx.saved_tensors
        options: Chunked = ctx.options
        of_labels = log_prob_grads if is_here is None else log_prob_grads.where(is_here, 0.0)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        weight_grad = None
        if needs_weight and ctx.direct_weight is not None:
            weight_grad = total_gradient(ctx.direct_weight)
        elif needs_weight:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            every = slice(None)
            for block in options.blocks(labels, len(weight)):
                words, part_bias = weight[block], None if bias is None else bias[block]
                log_all = options.logits(every, hidden, words, part_bias).sub_(normalisers[:, None])
                # d log p_label = onehot - p, d entropy = -p (log p + entropy)
                grads = log_all.exp().mul_(-log_prob_grads[:, None])
                if options.with_entropy:
                    finite = log_all.clamp(min=LEAST_LOGIT)
                    slope = (finite + entropies[:, None]) * entropy_grads[:, None]
                    grads.sub_(log_all.exp_().mul_(slope))
                own = labels - block.start
                is_inside = (own >= 0) & (own < len(words))
                grads.scatter_add_(-1, own.where(is_inside, 0)[:, None], of_labels.where(is_inside, 0.0)[:, None])
                grads.div_(rows_of(options.temperature, every))
                if bias_grad is not None:
                    bias_grad[block] = grads.sum(0)
                narrow = grads.to(weight.dtype)
                if hidden_grad is not None:
                    hidden_grad += multiply(narrow, words)
                if weight_grad is not None:
                    weight_grad[block] += multiply(narrow.T, hidden)
        if hidden_grad is not None and options.part is not None:
            hidden_grad = options.part.sum(hidden_grad)
        return (
            None if hidden_grad is None else hidden_grad.to(hidden.dtype),
            None if weight_grad is None or ctx.direct_weight is not None else weight_grad.to(ctx.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None,
            None,
            None,
        )
