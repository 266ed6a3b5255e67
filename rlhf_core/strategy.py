"""The abstract `Strategy`: how a model is trained across processes.

Its shape is that of a ColossalAI `Booster`. One strategy object owns the process group of a run;
`prepare` is called once for each trained model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from .place import Place

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class TrainedModel(NamedTuple):
    """A model prepared for training. Unpacks like `Booster.boost`'s first members."""

    model: nn.Module
    """As it is trained: wrapped or sharded."""
    optimizer: Optimizer
    """Optimizer of the trainable parameters."""
    scheduler: LRScheduler | None
    """Stepped after each optimizer step; None: a constant rate."""


class StateBytes(NamedTuple):
    """Memory of a trained model in one process, in bytes per parameter."""

    weights: float = 4.0
    """Bytes of the weights that a process holds."""
    gradients: float = 4.0
    """Per trained parameter, like the optimizer's state. A step needs gradients in float32."""
    optimizer: float = 8.0
    """Adam's two moments, and finer weights where the optimizer keeps them."""
    reference: float = 4.0
    """Weights of a frozen model."""
    activations: float = 1.0
    """Share of what the blocks keep of a row for its backward pass; below 1 where processes compute rows together."""


class Strategy(Place):
    """A place that owns its processes and prepares models so that the processes train them together.

    **Lockstep**: every rank makes the same number of forward, backward, step and gather calls on a
    prepared model; the trainer lets a rank with less work run empty, masked micro-batches.
    """

    def setup(self) -> None:
        """Join the process group. Called once, before anything else."""

    def teardown(self) -> None:
        """Leave the process group. Called once, also after an error."""

    def naming_lost_peers(self) -> AbstractContextManager[Any]:
        """Context of all training: an error caused by the loss of another process becomes one that names it."""
        return nullcontext()

    def state_bytes(self, num_processes: int, dtype: torch.dtype) -> StateBytes:
        """Memory of one of `num_processes` training processes; for `rlhf plan`, before any of them starts.

        dtype: type of the loaded weights. 16-bit weights have float32 master weights in the optimizer.
        """
        size = dtype.itemsize
        return StateBytes(weights=size, optimizer=12.0 if size == 2 else 8.0, reference=size)

    def gathered_bytes(self, model: nn.Module) -> int:
        """Weights and gradients, beside `state_bytes`, that a process holds only while it computes with them.

        For `rlhf plan`. The model may be on the meta device.
        """
        return 0

    def check_model(self, model: nn.Module) -> None:
        """Raise `UserInputError` where this strategy cannot train `model`, which may be on the meta device."""

    @abstractmethod
    def make_optimizer(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """The optimizer of one trained model: AdamW, unless the strategy needs another."""

    @abstractmethod
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        max_grad_norm: float | None = None,
    ) -> TrainedModel:
        """Wrap a model for training. Clipping is set here because Gemini takes it only in its constructor."""

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Context of one micro-batch's forward and backward; only the last one need reduce gradients."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Add the gradients of `loss` (a scalar) to those of earlier calls since the last step."""

    @property
    @abstractmethod
    def gradient_average_factor(self) -> int:
        """Divisor that the wrapped model applies to summed gradients (world size, or 1); the trainer undoes it."""

    @abstractmethod
    def step(self, trained: TrainedModel) -> float:
        """Clip, step optimizer and scheduler, zero gradients. Returns the global gradient norm before clipping.

        A norm that is not finite raises `DivergenceError` on every rank and changes nothing.
        Under fp16, which searches its loss scale, such a step is skipped and `inf` returned until the scale is 1.
        """

    def drop_gradients(self, trained: TrainedModel) -> None:
        """Discard the gradients since the last step, without a step. Every rank calls it."""
        trained.optimizer.zero_grad()

    @abstractmethod
    def state_dict_shards(
        self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Full, named tensors of the unwrapped model, plain `torch.Tensor`s, never more than one shard at once.

        Collective: every rank iterates to the end and gets every shard. Names are those of
        `unwrap(model).state_dict()`; `only` selects names; tied tensors appear once.
        """

    @abstractmethod
    def save_model(self, model: nn.Module, path: Path) -> None:
        """Collective. Write the weights as safetensors into the folder `path`."""

    @abstractmethod
    def load_model(self, model: nn.Module, path: Path) -> None: ...

    @abstractmethod
    def save_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        """Collective. Write the optimizer's state into the folder `path` (no pickle)."""

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, path: Path) -> None: ...

    @abstractmethod
    def save_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        """Collective. Write the scheduler's counters as JSON; the shape of the schedule comes from the run file."""

    @abstractmethod
    def load_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None: ...
