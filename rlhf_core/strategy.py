"""The abstract `Strategy`: how a model is trained across processes.

The interface is modeled on ColossalAI's `Booster`. One strategy object owns the process group of a run.
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
    """A model prepared for training, in the order of the first results of `Booster.boost`."""

    model: nn.Module
    """The wrapped or sharded model."""
    optimizer: Optimizer
    """Optimizer of the trainable parameters."""
    scheduler: LRScheduler | None
    """Stepped after each optimizer step. None means a constant learning rate."""


class StateBytes(NamedTuple):
    """Memory of a trained model in one process, in bytes per parameter of the whole model."""

    weights: float = 4.0
    """Weights that the process holds."""
    gradients: float = 4.0
    """Gradients, per trained parameter. A step needs them in float32."""
    optimizer: float = 8.0
    """Optimizer state, per trained parameter: Adam's two moments, and float32 master weights if it keeps them."""
    reference: float = 4.0
    """Weights of a frozen model."""
    activations: float = 1.0
    """Fraction of a row's saved activations that one process holds. Below 1 if several processes compute each row."""


class Strategy(Place):
    """A place that owns its processes and prepares models so that the processes train them together.

    The transport calls `setup` and `teardown` once in every trainer process. The trainer calls `prepare` once per
    trained model, then the methods of a step for each update. All calls are made on every rank.

    **Lockstep**: every rank makes the same number of forward, backward, step and gather calls on a prepared model.
    A rank with less work runs masked micro-batches.

    Example:
        strategy.setup()
        trained = strategy.prepare(model, strategy.make_optimizer(params, lr=1e-5), max_grad_norm=1.0)
        for index, batch in enumerate(micro_batches):
            with strategy.accumulate(trained.model, is_last=index + 1 == num_micro_batches), strategy.autocast():
                strategy.backward(loss(trained.model, batch), trained.optimizer)
        grad_norm = strategy.step(trained)
        strategy.teardown()
    """

    def setup(self) -> None:
        """Join the process group. Called once on every rank, before any other method."""

    def teardown(self) -> None:
        """Leave the process group. Called once on every rank, also after an error."""

    def naming_lost_peers(self) -> AbstractContextManager[Any]:
        """Return a context, active during training, that converts errors caused by a lost process to one naming it."""
        return nullcontext()

    def state_bytes(self, num_processes: int, dtype: torch.dtype) -> StateBytes:
        """Return the memory of one of `num_processes` training processes. Called by `rlhf plan`, without a group.

        Args:
            num_processes: Number of processes that will train the model.
            dtype: Type of the loaded weights. 16-bit weights have float32 master weights in the optimizer.
        """
        size = dtype.itemsize
        return StateBytes(weights=size, optimizer=12.0 if size == 2 else 8.0, reference=size)

    def gathered_bytes(self, model: nn.Module) -> int:
        """Return the bytes of weights and gradients that a process gathers temporarily, in addition to `state_bytes`.

        Called by `rlhf plan`. The model may be on the meta device.
        """
        return 0

    def check_model(self, model: nn.Module) -> None:
        """Raise `UserInputError` if this strategy cannot train `model`, which may be on the meta device."""

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
        """Build the optimizer of one trained model: AdamW, unless the strategy needs another one."""

    @abstractmethod
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        max_grad_norm: float | None = None,
    ) -> TrainedModel:
        """Wrap a model for training. `max_grad_norm` is set here because Gemini accepts it only in its constructor."""

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch's forward and backward. Only the last one needs to reduce gradients."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Add the gradients of `loss` (a scalar) to the gradients accumulated since the last step."""

    @property
    @abstractmethod
    def gradient_average_factor(self) -> int:
        """Divisor that the wrapped model applies to summed gradients (world size, or 1). The trainer reverts it."""

    @abstractmethod
    def step(self, trained: TrainedModel) -> float:
        """Clip gradients, step optimizer and scheduler, and zero the gradients. Collective.

        Returns:
            The global gradient norm before clipping. Under fp16, `inf` for a step skipped to lower the loss scale.

        Raises:
            DivergenceError: On every rank, if the norm is not finite (under fp16, once the loss scale is 1). Nothing
                changes.
        """

    def drop_gradients(self, trained: TrainedModel) -> None:
        """Discard the gradients accumulated since the last step, without a step. Called on every rank."""
        trained.optimizer.zero_grad()

    @abstractmethod
    def state_dict_shards(
        self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the full tensors of the unwrapped model as plain `torch.Tensor`s, one shard in memory at a time.

        Collective: every rank iterates to the end and receives every shard.

        Args:
            model: The prepared model.
            max_shard_bytes: Maximum size of a shard, unless a single tensor is larger.
            only: Selects tensors by name. None yields all of them.

        Yields:
            Name in `unwrap(model).state_dict()` -> tensor. Tied tensors appear once.
        """

    @abstractmethod
    def save_model(self, model: nn.Module, path: Path) -> None:
        """Write the weights as safetensors to the folder `path`. Collective."""

    @abstractmethod
    def load_model(self, model: nn.Module, path: Path) -> None:
        """Load the weights that `save_model` wrote. Collective."""

    @abstractmethod
    def save_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        """Write the optimizer's state to the folder `path`, without pickle. Collective."""

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        """Load the state that `save_optimizer` wrote. Collective."""

    @abstractmethod
    def save_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        """Write the scheduler's counters as JSON. The schedule itself comes from the run file. Collective."""

    @abstractmethod
    def load_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        """Load the counters that `save_lr_scheduler` wrote. Collective."""
