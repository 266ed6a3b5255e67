"""vLLM in a separate process: forwards the methods of `VllmBackend` over a private socket pair.

New weights are passed in shared-memory files, one shard at a time. No ports are opened.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_containment.processes import ProcessFault, ProcessTimeout, RequestProcess
from rlhf_core.errors import ConfigError, DeadlineError, EngineLostError
from rlhf_core.types import Completion
from rlhf_core.util import write_tensors
from rlhf_models import GenerationJob

from .start import WHERE, Settings, scratch_folder

if TYPE_CHECKING:
    from torch import Tensor


class VllmProcess:
    """Starts the process and waits until it is ready. It ends on `close`, or with this process."""

    def __init__(self, settings: Settings) -> None:
        self._answer_seconds = settings.config.answer_timeout_seconds
        environment = _environment(settings.device, settings.config.tensor_parallel_size)
        self._process = RequestProcess("rlhf_vllm.serve", memory_limit_bytes=sys.maxsize, environment=environment)
        self._is_closed = False
        self._scratch = tempfile.TemporaryDirectory(prefix="rlhf-vllm-", dir=scratch_folder())
        seconds = settings.config.start_timeout_seconds
        self.max_model_tokens: int = self._request("vLLM to start", settings, seconds=seconds)
        """Maximum length of prompt and answer together, in tokens."""

    def add(self, jobs: Sequence[GenerationJob], *, in_flight: bool) -> None:
        """See `VllmBackend`."""
        self._request("vLLM to accept requests", ("add", jobs, in_flight))

    def step(self) -> list[Completion]:
        """See `VllmBackend`."""
        completed: list[Completion] = self._request("a step of vLLM", ("step",))
        return completed

    def rest(self) -> None:
        """See `VllmBackend`."""
        if not self._is_closed:
            self._request("vLLM to release memory", ("rest",))

    def update(self, shards: Iterable[Mapping[str, Tensor]]) -> None:
        """See `VllmBackend`. With one worker, shared memory holds one shard at a time. A failure ends the process."""
        self._request("vLLM to prepare for new weights", ("update",))
        try:
            for number, shard in enumerate(shards):
                path = Path(self._scratch.name) / f"{number}.safetensors"
                write_tensors(path, dict(shard))
                self._request("vLLM to load new weights", path)
        except BaseException:
            self.close()  # it may hold mixed weights
            raise
        self._request("vLLM to apply new weights", None)

    def load_adapter(self, write: Callable[[Path], None]) -> None:
        """See `VllmBackend`. `write`: writes the adapter to a folder of shared memory, which this method removes."""
        folder = Path(self._scratch.name) / "adapter"
        try:
            write(folder)
            self._request("vLLM to load the adapter", ("load_adapter", folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        self._process.end()
        self._scratch.cleanup()

    def _request(self, what: str, request: Any, *, seconds: float | None = None) -> Any:
        """Send a request and return the result. After any error the process is ended.

        Raises the error that the process reports, `EngineLostError` if it died, or `DeadlineError`. `what` describes
        the awaited event for messages.
        """
        seconds = self._answer_seconds if seconds is None else seconds
        try:
            result, error = pickle.loads(self._process.ask(pickle.dumps(request), seconds))  # noqa: S301 - data of our own process
        except ProcessTimeout as fault:
            self.close()
            raise DeadlineError(
                f"waited {seconds:g} s for {what}: it {fault}",
                where=WHERE,
                hint="if it is only slow, raise engine.start_timeout_seconds or engine.answer_timeout_seconds",
            ) from None
        except ProcessFault as fault:
            self.close()
            raise EngineLostError(
                f"the vLLM process {fault}",
                where=WHERE,
                hint="see its output above. If out of memory, lower engine.kv_cache_bytes. Continue with --resume auto",
            ) from None
        except BaseException:
            self.close()  # otherwise its late response would be read as that of the next request
            raise
        if error is not None:
            self.close()
            raise error
        return result


def _environment(device: str, num_gpus: int) -> dict[str, str]:
    """Environment of the process: variables for vLLM, this process's thread count, and the GPUs that it may use.

    Raises `ConfigError` if fewer than `num_gpus` GPUs are visible, counted from `device`.
    """
    import torch

    environment = {
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if device.startswith("cuda"):
        first = int(device.partition(":")[2] or torch.cuda.current_device())
        visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        chosen = (visible or [str(index) for index in range(torch.cuda.device_count())])[first : first + num_gpus]
        if len(chosen) < num_gpus:
            raise ConfigError(
                f"tensor_parallel_size is {num_gpus}, but this process has {len(chosen)} GPUs starting at {device}",
                where="engine.tensor_parallel_size",
                hint=f"with --transport ray, set transport.maker_gpus to {num_gpus}",
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    return environment
