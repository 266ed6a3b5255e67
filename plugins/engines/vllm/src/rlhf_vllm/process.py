"""vLLM in a separate process: the methods of `VllmBackend`, over a private socket pair.

New weights are passed in shared-memory files, one shard at a time; nothing listens on a port.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_containment.processes import ChildProcess
from rlhf_core.errors import ConfigError, DeadlineError, EngineLostError
from rlhf_core.types import Completion, SamplingParams
from rlhf_core.util import write_tensors

from .jobs import Between, Job
from .start import WHERE, Settings, scratch_folder

if TYPE_CHECKING:
    from torch import Tensor

END_SECONDS = 10.0
"""How long the process may take to exit by itself."""
_LOOK_SECONDS = 0.01
"""How long the next completion is waited for before the caller is asked again what joins."""


class VllmProcess:
    """Starts the process and waits until it is ready; `close` ends it, and it ends when this process does."""

    max_model_tokens: int
    """Longest prompt and answer together."""
    forgets_weights: bool
    """See `VllmBackend`."""

    def __init__(self, settings: Settings) -> None:
        self._config = settings.config
        self._in_flight = False
        self._early: deque[Completion] = deque()
        """Completions that came while it was held."""
        environment = _environment(settings.device, settings.config.tensor_parallel_size)
        self._process = ChildProcess("rlhf_vllm.serve", environment=environment)
        self._connection = Connection(self._process.connection.detach())
        self._scratch = tempfile.TemporaryDirectory(prefix="rlhf-vllm-", dir=scratch_folder())
        try:
            self.send(settings)
            kind, about = self.receive("vLLM to start", self._config.start_timeout_seconds)
            assert kind == "ready"
            self.max_model_tokens, self.forgets_weights = about
        except BaseException:
            self.close()
            raise

    def generate(self, jobs: Sequence[Job], sampling: SamplingParams, version: int) -> Iterator[Completion]:
        """See `VllmBackend.generate`."""
        self.send(("generate", jobs, sampling, version))
        kind, seconds = "", self._config.answer_timeout_seconds
        try:
            while (received := self.receive("the next completion", seconds))[0] != "done":
                yield received[1]
        except GeneratorExit:
            if not self._connection.closed:
                self.send(("abort",))
                while kind != "done":
                    kind, _ = self.receive("the end of a generation", seconds)
            raise
        except BaseException:
            self.close()  # otherwise leftover completions would be read as the next call's
            raise

    def generate_in_flight(self, between: Between) -> Iterator[Completion]:
        """See `VllmBackend.generate_in_flight`; `hold` and `update` may be called in `between`.

        Raises what the process reports, `EngineLostError`, or `DeadlineError`.
        """
        self._in_flight, num_open, since = True, 0, 0.0
        try:
            self.send(("fly",))
            while True:
                joining, num_loads = between(num_open > 0)
                if joining:
                    since = since if num_open else time.monotonic()
                    self.send(("add", joining, num_loads))
                    num_open += len(joining)
                if not num_open:
                    break
                if arrived := self._arrived(since):
                    num_open, since = num_open - len(arrived), time.monotonic()
                    yield from arrived
            self.send(("land",))
            self.receive("the end of a generation", self._config.answer_timeout_seconds)
        except BaseException:
            self.close()  # leftover messages would be read as the next call's
            raise
        finally:
            self._in_flight = False

    def hold(self) -> None:
        """Have a generation in flight wait after its current step for a call of `update`, after which it continues."""
        seconds = self._config.answer_timeout_seconds
        if self._in_flight:
            self.send(("hold",))
            while (received := self.receive("vLLM to end a step", seconds))[0] != "held":
                self._early.append(received[1])

    def _arrived(self, since: float) -> list[Completion]:
        """Completions that are here or come shortly. `since`: when the last one came, or the first request was sent."""
        seconds = self._config.answer_timeout_seconds
        if not self._early and self._connection.poll(_LOOK_SECONDS):
            self._early.append(self.receive("the next completion", seconds)[1])
        if not self._early and time.monotonic() - since > seconds:
            raise DeadlineError(
                f"waited {seconds:g} s for the next completion",
                where=WHERE,
                hint="raise engine.answer_timeout_seconds if it is only slow",
            )
        arrived = [*self._early]
        self._early.clear()
        return arrived

    def update(self, shards: Iterable[Mapping[str, Tensor]]) -> None:
        """See `VllmBackend.update`. Only one shard is in shared memory at a time; a failure ends the process."""
        self.send(("update",))
        try:
            for number, shard in enumerate(shards):
                path = Path(self._scratch.name) / f"{number}.safetensors"
                write_tensors(path, dict(shard))
                self.send(path)
                self.receive("vLLM to load new weights", self._config.answer_timeout_seconds)
                path.unlink(missing_ok=True)
            self.send(None)
            self.receive("vLLM to take new weights", self._config.answer_timeout_seconds)
        except BaseException:
            self.close()  # it may hold mixed weights
            raise

    def close(self) -> None:
        """End the process by closing the connection, and by force where that is not enough."""
        self._connection.close()
        self._process.wait(END_SECONDS)
        self._process.end()
        self._scratch.cleanup()

    def send(self, message: Any) -> None:
        """Send a message. Raises like `receive` where the process is gone."""
        try:
            self._connection.send(message)
        except OSError:  # closed here, or by the process's end, whose last message gives the reason
            self.receive("the last message of the vLLM process", END_SECONDS)
            raise self._death() from None

    def receive(self, what: str, seconds: float) -> tuple[str, Any]:
        """The next message. Raises the error that the process reports, `EngineLostError` or `DeadlineError`."""
        deadline = time.monotonic() + seconds
        try:
            while not self._connection.poll(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"waited {seconds:g} s for {what}",
                        where=WHERE,
                        hint="raise engine.start_timeout_seconds or engine.answer_timeout_seconds if it is only slow",
                    )
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if kind == "failed":
            raise value
        return kind, value

    def _death(self) -> EngineLostError:
        return EngineLostError(
            f"the vLLM process {self._process.death()}",
            where=WHERE,
            hint="its output is above; out of memory? lower engine.kv_cache_bytes; go on with --resume auto",
        )


def _environment(device: str, num_gpus: int) -> dict[str, str]:
    """Variables of the process: the thread count of this one, and only the GPUs that it is to use.

    Raises `ConfigError` where this process has fewer than `num_gpus` from `device` on.
    """
    import torch

    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
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
