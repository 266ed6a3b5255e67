"""`program`: one episode of a command-line agent, which runs in the sandbox and calls the episode's endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_containment.sandbox import FolderFile, Limits, ProgramResult, SandboxedCommand, SandboxError, missing
from rlhf_core.components import TaskContext
from rlhf_core.errors import ConfigError, EpisodeError
from rlhf_core.util import printable
from rlhf_episodes import Endpoint, Outcome, Policy, Task

from .config import ProgramConfig
from .forwarder import Forwarder
from .running import RunningCommand
from .scoring import FolderReward, hint_to_read, score_by_command
from .task_folder import (
    FILES,
    SCORE_FILES,
    endpoint_variables,
    filled,
    folder_of,
    with_score_files,
    words_of_program,
    words_of_score,
)

logger = logging.getLogger(__name__)

_WALL_SECONDS = 86400.0
"""Wall-clock limit of the program. The deadline of the episode, which excludes the policy's time, ends it earlier."""
_QUOTED = 300
_PAGE = 4096
_FILES_OF_SCORE = 2
_REPLACED = ("/proc", "/sys", "/dev")
"""Folders that the sandbox replaces, or does not have."""
_STOPPED = {  # reason: problem and option
    "processor": ("used more than {program_cpu_seconds} s of processor time", "program_cpu_seconds"),
    "memory": ("used more than {program_memory_bytes} bytes of memory", "program_memory_bytes"),
    "output": ("wrote more than {max_output_bytes} bytes of output", "max_output_bytes"),
    "time": ("ran for more than a day", "timeout_seconds"),
}


@dataclass(frozen=True, slots=True)
class _Place:
    """The part of the sandbox that is equal for all episodes of a run."""

    command: tuple[str, ...]
    score: tuple[str, ...]
    readable: tuple[str, ...]
    path: str


class ProgramEnvironment:
    """Runs the program once, then scores its working folder."""

    def __init__(self, config: ProgramConfig, place: _Place, reward: FolderReward | None) -> None:
        self._config = config
        self._place = place
        self._reward = reward

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Play the episode. Raises `EpisodeError` if the program exceeds a limit, leaves a process or cannot run."""
        config = self._config
        files = folder_of(task.prompt, FILES, config.max_folder_bytes)
        scored = folder_of(task.prompt, SCORE_FILES, config.max_folder_bytes)
        try:
            result = await self._play(task, await policy.endpoint(), files)
        except asyncio.CancelledError:
            logger.warning("sample %d: the program %s was ended while it ran", task.sample_id, config.command[0])
            raise
        is_cut = result.exit_code != 0 and min(policy.remaining_turns, policy.remaining_tokens) <= 0
        reward, metrics = await self._score(task, result, with_score_files(result.files, scored))
        metrics["program_failed"] = float(result.exit_code != 0)
        return Outcome(reward=reward, metrics=metrics, status="truncated" if is_cut else "done")

    def close(self) -> None:
        """Release the reward."""
        if self._reward is not None:
            self._reward.close()

    async def _play(self, task: Task, endpoint: Endpoint, files: Mapping[str, FolderFile]) -> ProgramResult:
        config = self._config
        forwarder = Forwarder(endpoint.base_url)
        words = words_of_program(task.prompt, endpoint)
        own = dict(zip(config.variables, filled(list(config.variables.values()), words), strict=True))
        running = RunningCommand(
            SandboxedCommand(
                command=filled(self._place.command, words),
                files=files,
                variables={"PATH": self._place.path, **endpoint_variables(endpoint), **own},
                readable=self._place.readable,
                limits=self._limits(_WALL_SECONDS),
                port=forwarder.port,
            )
        )
        try:
            if (listener := await running.listening()) is not None:
                forwarder.start(listener)
            either: tuple[asyncio.Future[Any], ...] = (running.result, forwarder.fault)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if forwarder.fault.done():
                raise EpisodeError(
                    f"the endpoint of the episode does not answer: {forwarder.fault.result()}",
                    where="environment",
                    hint="see the log for why its server has ended",
                )
            result = running.result.result()
        except SandboxError as error:
            raise EpisodeError(str(error), where="environment.command", hint=hint_to_read(str(error))) from error
        finally:
            forwarder.stop()
            await running.end()
            await forwarder.wait_closed()
        self._check(result, endpoint, is_called=forwarder.num_connections > 0)
        return result

    def _check(self, result: ProgramResult, endpoint: Endpoint, *, is_called: bool) -> None:
        """Raise `EpisodeError` if the program was stopped, or failed before it called the endpoint."""
        config, name = self._config, printable(self._config.command[0])
        if result.stopped_for in _STOPPED:
            problem, option = _STOPPED[result.stopped_for]
            raise EpisodeError(
                f"the program {name} {problem.format(**config.model_dump(include={option}))}",
                where=f"environment.{option}",
                hint=f"raise environment.{option}, or set environment.on_failure: zero or drop",
            )
        if result.stopped_for == "child":
            raise EpisodeError(
                f"the program {name} ended but left processes running: {printable(result.problem)[:_QUOTED]}",
                where="environment.command",
                hint="have it end the processes that it starts, or set environment.on_failure: zero or drop",
            )
        if result.stopped_for == "folder":
            raise EpisodeError(
                f"the working folder that the program {name} left {printable(result.problem)[:_QUOTED]}",
                where="environment.max_folder_bytes",
                hint="have it delete files that the score does not need, or set environment.on_failure: zero or drop",
            )
        if result.exit_code and not is_called:
            quoted = (result.error_output or result.output).replace(endpoint.api_key, "***")[-_QUOTED:]
            raise EpisodeError(
                f"the program {name} ended with exit code {result.exit_code} before it called the endpoint: "
                f"{printable(' '.join(quoted.split()))}",
                where="environment.command",
                hint="check its arguments, environment.variables and environment.read",
            )

    async def _score(
        self, task: Task, result: ProgramResult, files: Mapping[str, FolderFile]
    ) -> tuple[float, dict[str, float]]:
        if self._reward is not None:
            return await self._reward.score(task, result, files), {}
        command = SandboxedCommand(
            command=filled(self._place.score, words_of_score(task.prompt)),
            files=files,
            variables={"PATH": self._place.path},
            readable=self._place.readable,
            limits=self._limits_of_score(),
        )
        return await score_by_command(command, is_printed=self._config.score_is_printed)

    def _limits(self, seconds: float) -> Limits:
        config = self._config
        return Limits(
            timeout_seconds=seconds,
            cpu_seconds=config.program_cpu_seconds,
            memory_bytes=config.program_memory_bytes,
            max_processes=config.max_processes,
            max_output_bytes=config.max_output_bytes,
            max_file_bytes=config.max_folder_bytes,
            max_folder_bytes=config.max_folder_bytes,
            max_files=config.max_files,
        )

    def _limits_of_score(self) -> Limits:
        """Limits of the score. Any folder that the program may leave fits with `score_files`, sparse files included."""
        config = self._config
        size = 2 * config.max_folder_bytes + _PAGE * config.max_files
        own = self._limits(config.score_seconds)
        return replace(own, max_file_bytes=size, max_folder_bytes=size, max_files=_FILES_OF_SCORE * config.max_files)


def build(config: ProgramConfig, context: TaskContext) -> ProgramEnvironment:
    """Build the environment of one episode.

    Raises `ConfigError` if this machine does not support the mode `namespaces`, or a path in `read` is missing.
    """
    if lacking := missing("namespaces"):
        raise ConfigError(
            f"the environment program runs programs in namespaces only: {lacking}",
            where="environment.name",
            hint="play its episodes on Linux with user namespaces (in a container, allow them in its seccomp profile)",
        )
    base = context.base_folder
    readable = [_absolute(path, base) for path in config.read]
    for given, path in zip(config.read, readable, strict=True):
        if not os.path.exists(path):
            raise ConfigError(
                f"{given!r} does not exist", where="environment.read", hint=f"create {path}, or remove it from read"
            )
        if (
            (real := os.path.realpath(path)) == "/"
            or real.startswith(tuple(f"{each}/" for each in _REPLACED))
            or (real in _REPLACED)
        ):
            raise ConfigError(
                f"{given!r} is {real}, a part of the system that the sandbox replaces",
                where="environment.read",
                hint="name the folders that the program needs",
            )
    command, score = list(config.command), [] if isinstance(config.score, dict) else list(config.score)
    for words in (command, score):
        if words and "/" in words[0]:
            words[0] = _absolute(words[0], base)
            readable.append(words[0])
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    place = _Place(tuple(command), tuple(score), tuple(_outermost(readable)), path)
    reward = FolderReward(config.score, context.seed) if isinstance(config.score, dict) else None
    return ProgramEnvironment(config, place, reward)


def _absolute(path: str, base: Path) -> str:
    return os.path.abspath(base / Path(path).expanduser())


def _outermost(paths: list[str]) -> list[str]:
    """Return the paths that exist and are not below another."""
    return [
        path
        for path in sorted(set(paths))
        if os.path.exists(path) and not any(path.startswith(f"{other}/") for other in paths)
    ]
