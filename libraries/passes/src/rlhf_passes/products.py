"""How this CPU multiplies matrices, measured once per machine: float32 with the faster library, bfloat16 fast or not.

torch multiplies float32 matrices on a CPU with MKL, whose fastest kernels run on some processors only. oneDNN, which
torch includes and uses for bfloat16, selects kernels by processor features, and is up to twice as fast on others. Both
sum in another order, so results differ in the last bits. The measurement takes a fraction of a second, and its result
is in the user's cache folder: all runs on a machine compute alike. `train.deterministic` replaces it by torch's own.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_MIN_GAIN = 1.25
"""Minimum ratio of the times at which oneDNN is used. Smaller differences are noise."""
_MIN_BFLOAT16_GAIN = 2.0
"""Minimum ratio of the times at which bfloat16 counts as fast. Instructions for it multiply by 2 to 8."""
_NAMES = ("torch", "onednn", "bfloat16")
_ROUNDS = 5
_SECONDS = 0.5
"""Time after which no further round starts."""
_UNSUPPORTED_MS = 1e6
_MAX_RESULTS = 100
"""Maximum number of results in the file, since containers may have a new name each time."""
_SHAPE = (256, 512, 1536)
"""Tokens, inputs and outputs of the measured layer."""


class _Choice:
    """The choice of this process."""

    def __init__(self) -> None:
        self.is_fixed = False
        self.onednn: bool | None = None
        self.measured: Mapping[str, float] = {}


_CHOICE = _Choice()


def uses_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices on the CPU in this process. Measured at the first call."""
    if _CHOICE.is_fixed or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if _CHOICE.onednn is None:
        _CHOICE.measured = _cached(_cache_file(), _machine(), measure_products)
        _CHOICE.onednn = _CHOICE.measured["torch"] >= _MIN_GAIN * _CHOICE.measured["onednn"]
    return _CHOICE.onednn


def multiplies_bfloat16_fast() -> bool:
    """Whether bfloat16 products take at most half the time of float32 ones on the CPU. False under `fix_products`."""
    uses_onednn()
    measured = _CHOICE.measured
    if _CHOICE.is_fixed or not measured:
        return False
    return min(measured["torch"], measured["onednn"]) >= _MIN_BFLOAT16_GAIN * measured["bfloat16"]


def fix_products(*, fixed: bool) -> None:
    """Multiply with torch's own library from now on, independent of the machine, or with the faster one.

    Args:
        fixed: Whether `train.deterministic` is set.
    """
    _CHOICE.is_fixed = fixed


def chosen_products() -> Mapping[str, Any] | None:
    """Return the choice as JSON values for the manifest of a run. None if nothing was multiplied yet.

    Example:
        >>> fix_products(fixed=True)
        >>> chosen_products()
        {'library': 'torch', 'measured_ms': {}}
        >>> fix_products(fixed=False)
    """
    if _CHOICE.is_fixed:
        return {"library": "torch", "measured_ms": {}}
    if _CHOICE.onednn is None:
        return None
    return {"library": "onednn" if _CHOICE.onednn else "torch", "measured_ms": dict(_CHOICE.measured)}


def measure_products() -> Mapping[str, float]:
    """Measure forward and backward products of a layer, in milliseconds of processor time for each way to multiply.

    What this build of torch or the processor does not support has a very large time.
    """
    tokens, inputs, outputs = _SHAPE
    shapes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    left, weight, grads = (torch.ones(shape, dtype=torch.float32, device="cpu") for shape in shapes)
    products = [(left, weight), (grads, weight.T), (grads.T, left.T)]
    narrow = [(one.bfloat16(), other.bfloat16()) for one, other in products]
    best = dict.fromkeys(_NAMES, float("inf"))
    run: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "torch": torch.nn.functional.linear,
        "onednn": lambda one, other: torch.ops.mkldnn._linear_pointwise.default(one, other, None, "none", [], ""),
        "bfloat16": torch.nn.functional.linear,
    }
    started = time.perf_counter()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            run["onednn"](*products[0])
        except (AttributeError, RuntimeError):  # an operation or kernel that this build lacks
            return {"torch": 1.0, "onednn": _UNSUPPORTED_MS, "bfloat16": _UNSUPPORTED_MS}
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            del run["bfloat16"]
            best["bfloat16"] = _UNSUPPORTED_MS
        for number in range(_ROUNDS):
            for name, multiply in run.items():
                before = time.process_time()
                for one, other in narrow if name == "bfloat16" else products:
                    multiply(one, other)
                if number:  # the first round prepares the kernels
                    best[name] = min(best[name], 1000 * (time.process_time() - before))
            if number and time.perf_counter() - started > _SECONDS:
                break
    return {name: round(value, 3) for name, value in best.items()}


def _machine() -> str:
    """Identify everything that the result depends on: torch, the computer and the number of threads."""
    features = torch.backends.cpu.get_cpu_capability()
    computer = platform.node(), platform.machine(), features, os.cpu_count()
    return " ".join(map(str, (torch.__version__, *computer, torch.get_num_threads())))


def _cache_file() -> Path | None:
    """Return the file in the user's cache folder, None for a user without a home folder."""
    try:
        if sys.platform == "darwin":
            folder = Path.home() / "Library" / "Caches"
        else:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # such as an arbitrary user id in a container
        return None
    return folder / "rlhf" / "products.json"


def _cached(file: Path | None, machine: str, measure: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """Return the result in `file`, or measure and add it. A file that cannot be read or written is ignored.

    If another process has measured meanwhile, its result counts, so that processes of a run agree.
    """
    if file is None:
        return measure()
    known = _read(file).get(machine)
    if known is not None:
        return known
    measured = measure()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        results = _read(file)
        measured = results.setdefault(machine, measured)
        newest = dict(list(results.items())[-_MAX_RESULTS:])
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(newest, indent=1))
        temporary.replace(file)
    return measured


def _read(file: Path) -> dict[str, Mapping[str, float]]:
    """Return the valid results in a file, by machine."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {machine: each for machine, each in found.items() if _is_result(each)}


def _is_result(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), int | float) for name in _NAMES)
