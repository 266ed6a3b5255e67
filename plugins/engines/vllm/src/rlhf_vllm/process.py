"""vLLM in a process of its own: the methods of `VllmBackend`, each asked for over a private socket pair.

New weights are passed in shared-memory files, one shard at a time; nothing listens on a port.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_containment.processes import ProcessFault, ProcessTimeout, RequestProcess
from rlhf_core.errors import ConfigError, DeadlineError, EngineLostError
from rlhf_core.types import Completion
from rlhf_core.util import write_tensors

from .backend import Job
from .start import WHERE, Settings, scratch_folder

if TYPE_CHECKING:
    from torch import Tensor


class VllmProcess:
    """Starts the process and waits until it is ready; `close` ends it, and it ends when this process does."""

    def __init__(self, settings: Settings) -> None:
        self._answer_seconds = settings.config.answer_timeout_seconds
        environment = _environment(settings.device, settings.config.tensor_parallel_size)
        self._process = RequestProcess("rlhf_vllm.serve", memory_limit_bytes=sys.maxsize, environment=environment)
        self._is_closed = False
        self._scratch = tempfile.TemporaryDirectory(prefix="rlhf-vllm-", dir=scratch_folder())
        seconds = settings.config.start_timeout_seconds
        self.max_model_tokens: int = self._ask("vLLM to start", settings, seconds=seconds)
        """Longest prompt and answer together."""

    def add(self, jobs: Sequence[Job], *, in_flight: bool) -> None:
        """See `VllmBackend`."""
        self._ask("vLLM to take up answers", ("add", jobs, in_flight))

    def step(self) -> list[Completion]:
        """See `VllmBackend`."""
        completed: list[Completion] = self._ask("a step of vLLM", ("step",))
        return completed

    def rest(self) -> None:
        """See `VllmBackend`."""
        if not self._is_closed:
            self._ask("vLLM to rest", ("rest",))

    def update(self, shards: Iterable[Mapping[str, Tensor]]) -> None:
        """See `VllmBackend`. For one worker, one shard is in shared memory at a time; a failure ends the process."""
        self._ask("vLLM to ask for new weights", ("update",))
        try:
            for number, shard in enumerate(shards):
                path = Path(self._scratch.name) / f"{number}.safetensors"
                write_tensors(path, dict(shard))
                self._ask("vLLM to load new weights", path)
        except BaseException:
            self.close()  # it may hold mixed weights
            raise
        self._ask("vLLM to take new weights", None)

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        self._process.end()
        self._scratch.cleanup()

    def _ask(self, what: str, request: Any, *, seconds: float | None = None) -> Any:
        """The answer to a request. Raises the error that the process reports, `EngineLostError` or `DeadlineError`.

        After an error the process is ended.
        """
        seconds = self._answer_seconds if seconds is None else seconds
        try:
            answer, error = pickle.loads(self._process.ask(pickle.dumps(request), seconds))  # noqa: S301 - our own code's
        except ProcessTimeout as fault:
            self.close()
            raise DeadlineError(
                f"waited {seconds:g} s for {what}: it {fault}",
                where=WHERE,
                hint="raise engine.start_timeout_seconds or engine.answer_timeout_seconds if it is only slow",
            ) from None
        except ProcessFault as fault:
            self.close()
            raise EngineLostError(
                f"the vLLM process {fault}",
                where=WHERE,
                hint="its output is above; out of memory? lower engine.kv_cache_bytes; go on with --resume auto",
            ) from None
        except BaseException:
            self.close()  # its answer would be read as the next request's
            raise
        if error is not None:
            self.close()
            raise error
        return answer


def _environment(device: str, num_gpus: int) -> dict[str, str]:
    """Variables of the process: those of vLLM, the thread count of this one, and only the GPUs that it is to use.

    Raises `ConfigError` where this process has fewer than `num_gpus` from `device` on.
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
                f"tensor_parallel_size is {num_gpus}, but this process has {len(chosen)} GPUs from {device} on",
                where="engine.tensor_parallel_size",
                hint=f"with --transport ray, set transport.maker_gpus to {num_gpus}",
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    return environment
