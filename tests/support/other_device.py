"""A second device on a machine with only a CPU: PyTorch's backend for devices written in Python.

`DEVICE` computes on the CPU, but distinguishes its tensors from CPU tensors: an operation on both raises the same error
as on a GPU, and so does reading a value without moving it first. Operations that a GPU allows are allowed: CPU scalars
without dimensions among the operands, CPU indices, and copies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.checkpoint import set_checkpoint_early_stop

DEVICE = torch.device("privateuseone", 0)
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_MOVES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_SCALARS = {_aten.where.self, _aten.fill_.Tensor, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor}
"""Operations that accept a CPU scalar, as all elementwise ones do (`torch.Tag.pointwise`)."""
_MADE = (
    "arange", "arange.start", "arange.start_step", "empty.memory_format", "empty_strided", "randperm",
    "randperm.generator", "tril_indices", "triu_indices",
)  # fmt: skip
"""Operations that create a tensor. PyTorch implements all others with `empty`."""
computed: set[str] = set()
"""Names of the operations that were called with a tensor on `DEVICE`."""


class OtherTensor(Tensor):
    """A tensor on `DEVICE`. `values` is on the CPU, and only this file may use it."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> OtherTensor:
        """Create a tensor with the layout of `values`, without its memory."""
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        tensor.values = values
        return cast("OtherTensor", tensor)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Omit the values, since printing would move them."""
        return f"OtherTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Return the values. A GPU would move them for this call, too."""
        return self.values.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage, by which tensors that share memory are found."""
        return self.values.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the CPU if a GPU would accept the operands."""
        computed.add(str(func))
        kwargs = dict(kwargs or {})
        if func not in _MOVES:
            _check_places(func, args, kwargs)
        target = kwargs.get("device")
        leaves = target is not None and torch.device(target).type == "cpu"
        if target is not None:
            kwargs["device"] = _CPU
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        if func is _aten._fused_sdp_choice.default:
            return 0  # products and a softmax, which any device supports
        out = func(*plain_args, **plain_kwargs)
        if func is _aten.copy_.default or "out" in kwargs or func._schema.is_mutable:
            return _in_place_result(func, args, kwargs, out)
        if leaves:
            return out.clone() if any(out is each for each in tree_flatten(plain_args)[0]) else out
        # In inference mode, too, a view of a tensor made outside is none of inference.
        outside = func.is_view and not args[0].is_inference()
        with torch.inference_mode(torch.is_inference_mode_enabled() and not outside):
            return tree_map(_wrapped, out)


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, OtherTensor) else value


def _wrapped(value: Any) -> Any:
    return OtherTensor(value) if isinstance(value, Tensor) and not isinstance(value, OtherTensor) else value


def _in_place_result(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Return the operand tensors of an in-place operation instead of new ones."""
    operands = {id(each.values): each for each in tree_flatten((args, kwargs))[0] if isinstance(each, OtherTensor)}
    for each in operands.values():
        if each.values.shape != each.shape:
            raise NotImplementedError(f"{func} gave a tensor another shape in place")
    return tree_map(lambda value: operands.get(id(value), value), out)


def _check_places(func: Any, args: Any, kwargs: Any) -> None:
    """Raise `RuntimeError` like a GPU if an operand must not be on the CPU."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{func}: expected a generator on {DEVICE}, found one on the CPU")
    checked = [args[0], *args[2:]] if func in _INDEXING else args
    takes_numbers = torch.Tag.pointwise in func.tags or func in _SCALARS | _INDEXING
    for value in tree_flatten((checked, kwargs))[0]:
        if isinstance(value, Tensor) and not isinstance(value, OtherTensor) and (value.ndim or not takes_numbers):
            message = (
                f"{func}: expected all tensors to be on {DEVICE}, found one of shape {tuple(value.shape)} on the CPU"
            )
            print(message, file=sys.stderr, flush=True)  # the error itself may end the process: see `usable`
            raise RuntimeError(message)


class _Module:
    """`torch.elsewhere`: the functions that PyTorch calls in a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing, since random numbers come from the CPU."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@cache
def register() -> None:
    """Register `DEVICE` with PyTorch, until this process ends."""
    _setup_privateuseone_for_python_backend("elsewhere", backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    for name in _MADE:
        library.impl(name, _maker(name), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    register.library = library  # type: ignore[attr-defined]  # its kernels go with it
    torch.__future__.set_swap_module_params_on_conversion(True)


@contextmanager
def usable() -> Iterator[None]:
    """Settings for a Python device, without which an error in a backward pass ends the process."""
    with torch.autograd.grad_mode.set_multithreading_enabled(False), set_checkpoint_early_stop(False):
        yield


def _maker(name: str) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(_aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> OtherTensor:
        return OtherTensor(op(*args, **{**kwargs, "device": _CPU, "pin_memory": False}))

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _plain(target).copy_(_plain(source))
    return target
