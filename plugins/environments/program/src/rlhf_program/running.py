"""A command in the sandbox, awaited by an event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

from rlhf_containment.sandbox import CommandRun, ProgramResult, SandboxedCommand

_END_SECONDS = 5.0


class RunningCommand:
    """Runs a command on its own thread, since the kernel ends a command with the thread that started it."""

    def __init__(self, command: SandboxedCommand) -> None:
        """Start the command. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._run = CommandRun(command)
        self.listener: asyncio.Future[socket.socket | None] = self._loop.create_future()
        """Socket that listens on the command's port, before it starts. None without a port, or if it did not start."""
        self.result: asyncio.Future[ProgramResult] = self._loop.create_future()
        """Result, or the `SandboxError` of the run."""
        threading.Thread(target=self._work, name=f"sandbox of {command.command[0]}", daemon=True).start()

    async def ended(self) -> ProgramResult:
        """Wait for the result. Canceling this does not cancel `result`, which `end` waits for."""
        await asyncio.wait({self.result})
        return self.result.result()

    async def listening(self) -> socket.socket | None:
        """Wait for the value of `listener`."""
        await asyncio.wait({self.listener})
        return self.listener.result()

    async def end(self) -> None:
        """Kill the command if it runs, and wait for its end."""
        self._run.stop()
        await asyncio.wait({self.result}, timeout=_END_SECONDS)
        if self.result.done():
            self.result.exception()  # retrieved, so that asyncio does not log it
        if self.listener.done() and (listener := self.listener.result()) is not None:
            listener.close()

    def _work(self) -> None:
        try:
            result = self._run.run(lambda listener: self._call(_set, self.listener, listener))
        except BaseException as error:  # raised again by `result`
            self._call(_fail, self.result, error)
        else:
            self._call(_set, self.result, result)
        finally:
            self._call(_set, self.listener, None)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed while the command was ending
            return


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
