"""The abstract `Place`: where models run forward, and with which other processes. A `Strategy` also trains them."""

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
    """Device, precision and processes of models that run forward; what engines, passes and evaluations need.

    **Lockstep**: every rank makes the same number of forward and gather calls on a model that is sharded.
    """

    passes: str = "rlhf_core.models.forward_passes:ForwardPasses"
    """`module:attribute` of the `ForwardPasses` by which models run forward; padded rows by default."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Which share of the rows is this process's: processes that compute the same rows together are one rank."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks, by which rows are shared; reductions and gathers are over them."""

    @property
    def num_processes(self) -> int:
        """More than `world_size` where several processes compute the same rows together (tensor parallelism)."""
        return self.world_size

    def agreed(self, value: ValueT) -> ValueT:
        """The value (picklable) of the first of the processes that are one rank with this one; collective.

        Asked before a forward pass of rows that these processes have each made by themselves.
        """
        return value

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device this process computes on."""

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files."""
        return self.rank == 0

    @property
    @abstractmethod
    def shards_parameters(self) -> bool:
        """True where a prepared model is not whole in this process, so an engine needs its own copy."""

    @property
    @abstractmethod
    def parameter_dtype(self) -> torch.dtype:
        """Type of the trained parameters."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of every training forward (mixed precision); nothing by default."""
        return nullcontext()

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Type of matrix products in a training forward where weights are float32; None is float32 too.

        By default the type of `autocast`; a strategy that casts the weights itself overrides it.
        """
        import torch

        kind = self.device.type
        with self.autocast():
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def model_init_context(self) -> AbstractContextManager[Any]:
        """Context in which models are built (lazy or meta initialisation)."""
        return nullcontext()

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        """Place a frozen model (reference) that is only run forward."""
        return model.to(self.device).eval().requires_grad_(False)

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """The tensor reduced over ranks, as a new tensor of the same dtype; every rank calls it."""

    @abstractmethod
    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value (picklable), in rank order; every rank calls it."""

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value."""
        return self.all_gather_objects(value)[0]

    def run_on_main(self, action: Callable[[], object]) -> None:
        """Run on rank 0 while the others wait; its error is raised everywhere."""
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
        """The model inside the wrapper."""


class LocalPlace(Place):
    """One process by itself, which holds whole models; for makers, evaluations and tests.

    Example:
        >>> place = LocalPlace(torch.device("cpu"), torch.float32)
        >>> place.all_gather_objects("mine")
        ['mine']
    """

    rank = 0
    world_size = 1
    shards_parameters = False

    def __init__(
        self, device: torch.device, parameter_dtype: torch.dtype, compute_dtype: torch.dtype | None = None
    ) -> None:
        self._device = device
        self._types = parameter_dtype, compute_dtype

    @classmethod
    def like(cls, place: Place) -> LocalPlace:
        """Device, precision and passes of another place, whose weights may be cast or sharded, for whole models."""
        local = cls(place.device, place.parameter_dtype, place.compute_dtype)
        local.passes = place.passes
        return local

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self._types[0]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._types[1]

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
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device of this process, alone or under a launcher.

    Raises `UserInputError` where there is no such GPU.
    """
    import torch

    local_rank = read_launch_env().local_rank
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserInputError(f"there is no GPU for device {name!r}", where="model.device", hint="use `auto` or `cpu`")
    index = int(name.partition(":")[2]) if ":" in name else local_rank
    if index >= torch.cuda.device_count():
        raise UserInputError(
            f"process {local_rank} of this machine wants GPU {index}, but there are {torch.cuda.device_count()}",
            where="model.device",
            hint="start no more processes than GPUs (`--num-processes`), or use `--set model.device=cpu`",
        )
    return torch.device("cuda", index)
