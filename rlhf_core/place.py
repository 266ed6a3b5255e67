"""The abstract `Place`: the device and processes on which models run forward. A `Strategy` also trains them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .distributed.launch_env import read_launch_env
from .errors import UserInputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ValueT = TypeVar("ValueT")
ReduceOp = Literal["sum", "max", "min"]
"""How `Place.all_reduce` combines the values of all ranks."""


class Place(ABC):
    """Device, precision and processes of models that run forward, for engines, passes and evaluations.

    Each process has one place. Makers, passes and evaluations read its properties and call its collectives, always on
    every rank and in the same order.

    **Lockstep**: every rank makes the same number of forward and gather calls on a sharded model.

    Example:
        model = place.prepare_inference(model)
        mine = prompts[place.rank :: place.world_size]
        with place.autocast():
            scores = score(model, mine)
        total = place.all_reduce(scores.sum())
        place.run_on_main(lambda: write(path, total))
    """

    passes: str = "rlhf_core.models.forward_passes:ForwardPasses"
    """`module:attribute` of the `ForwardPasses` that run models forward. By default, rows are padded."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Index of this process's share of the rows. Processes that compute the same rows together share a rank."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks that share the rows. Reductions and gathers are over ranks."""

    @property
    def num_processes(self) -> int:
        """Number of processes. More than `world_size` if several compute the same rows (tensor parallelism)."""
        return self.world_size

    def agreed(self, value: ValueT) -> ValueT:
        """Return the value of the first process of this rank, on all processes of the rank. Collective.

        Called before a forward pass of rows that each of these processes has made separately.

        Args:
            value: This process's value (picklable).
        """
        return value

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device that this process computes on."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files (rank 0)."""
        return self.rank == 0

    @property
    @abstractmethod
    def shards_parameters(self) -> bool:
        """Whether a process holds only a part of a prepared model, so that an engine needs its own copy."""

    @property
    @abstractmethod
    def parameter_dtype(self) -> torch.dtype:
        """Dtype of the trained parameters."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of every training forward (mixed precision). By default it does nothing."""
        return nullcontext()

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of matrix products in a training forward with float32 weights. None means float32.

        The dtype of `autocast` by default. A strategy that casts the weights itself overrides it.
        """
        import torch

        kind = self.device.type
        with self.autocast():
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def model_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which models are built (lazy or meta initialization)."""
        return nullcontext()

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        """Place a frozen model (a reference) that is only run forward.

        Args:
            model: The loaded model, on the CPU or as `model_init_context` built it.
        """
        return model.to(self.device).eval().requires_grad_(False)

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return the tensor reduced over ranks, as a new tensor of the same dtype. Called on every rank.

        Args:
            tensor: This rank's tensor, of the same shape and dtype on every rank.
            op: Reduction over ranks.
        """

    @abstractmethod
    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Called on every rank.

        Args:
            value: This rank's value (picklable).
        """

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value. Called on every rank.

        Args:
            value: This rank's value (picklable). Only rank 0's is used.
        """
        return self.all_gather_objects(value)[0]

    def run_on_main(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0 while the other ranks wait. Called on every rank, and raises its error on all of them.

        Args:
            action: Called on rank 0 without arguments. Its result is ignored.
        """
        error: BaseException | None = None
        if self.is_main:
            try:
                action()
            except Exception as caught:
                error = caught
        error = self.broadcast_object(error)
        if error is not None:
            raise error

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrapper.

        Args:
            model: A prepared model.
        """

    def num_parameters(self, model: nn.Module) -> int:
        """Return the number of parameters of a model, including those on other ranks.

        Args:
            model: A prepared model.
        """
        return sum(parameter.numel() for parameter in self.unwrap(model).parameters())


class LocalPlace(Place):
    """A single process that holds whole models, for makers, evaluations and tests.

    Example:
        >>> import torch
        >>> place = LocalPlace(torch.device("cpu"), torch.float32)
        >>> place.all_gather_objects("mine"), place.all_reduce(torch.tensor(2.0))
        (['mine'], tensor(2.))
    """

    rank = 0
    world_size = 1
    shards_parameters = False

    def __init__(
        self, device: torch.device, parameter_dtype: torch.dtype, compute_dtype: torch.dtype | None = None
    ) -> None:
        """Create the place of this process.

        Args:
            device: Device that models run on.
            parameter_dtype: Dtype of the parameters.
            compute_dtype: Dtype of `autocast`. None disables it.
        """
        self._device = device
        self._dtypes = parameter_dtype, compute_dtype

    @classmethod
    def like(cls, place: Place) -> LocalPlace:
        """Return a place for whole models with the device, precision and passes of another place."""
        local = cls(place.device, place.parameter_dtype, place.compute_dtype)
        local.passes = place.passes
        return local

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self._dtypes[0]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._dtypes[1]

    def autocast(self) -> AbstractContextManager[Any]:
        import torch

        return nullcontext() if self.compute_dtype is None else torch.autocast(self.device.type, self.compute_dtype)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return tensor.clone()

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


def resolve_device(name: str) -> torch.device:
    """Return the device of this process, alone or under a launcher.

    Args:
        name: `cpu`, `cuda:N`, `cuda` (the GPU of the launcher's local rank), or `auto` (`cuda` if available).

    Raises:
        UserInputError: The GPU does not exist.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    import torch

    local_rank = read_launch_env().local_rank
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserInputError(f"no GPU is available for {name!r}", where="model.device", hint="use `auto` or `cpu`")
    index = int(name.partition(":")[2]) if ":" in name else local_rank
    if index >= torch.cuda.device_count():
        raise UserInputError(
            f"process {local_rank} needs GPU {index}, but this machine has {torch.cuda.device_count()}",
            where="model.device",
            hint="start no more processes than GPUs (`--num-processes`), or use `--set model.device=cpu`",
        )
    return torch.device("cuda", index)
