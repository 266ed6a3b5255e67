"""`rlhf ray status RUN` and `rlhf ray stop RUN`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from rlhf_core.errors import DeadlineError, UserInputError
from rlhf_core.util import printable

from .status_file import RunningJob, read_status

_RUN = click.argument("run", type=click.Path(path_type=Path))


@click.group("ray", help="Look at a detached run, or stop it.")
def ray() -> None:
    """Group of the `rlhf ray` commands."""


@ray.command("status", help="What the actors of the run in folder RUN do.")
@_RUN
def status(run: Path) -> None:
    """Print the newest state as plain, uncut lines."""
    found = _going_on(run)
    if found is None:
        return
    values = found.values
    age = time.time() - values.updated
    state = "running" if found.is_running else "not heard of"
    _say(f"{run}: {state}, driver pid {found.driver_pid} on {values.host}, {age:.0f} s ago")
    _say(f"  Ray {values.address}, namespace {values.namespace}")
    _say(f"  policy version {values.version}; {values.progress}")
    for trainer in values.trainers:
        _say(f"  {trainer.name}  pid {trainer.pid}  trains")
    for maker in values.makers:
        restarts = f"  started anew {maker.restarts} times" if maker.restarts else ""
        weights = "no weights yet" if maker.version is None else f"version {maker.version}"
        _say(f"  {maker.name}  pid {maker.pid}  {maker.doing} since {maker.for_s:g} s  {weights}{restarts}")


@ray.command("stop", help="Stop the run in folder RUN: after the episode, with a checkpoint; --now at once.")
@_RUN
@click.option("--now", is_flag=True, help="Do not wait for the episode and a checkpoint.")
@click.option("--timeout", "timeout_seconds", type=float, default=600.0, show_default=True, help="Seconds to wait.")
def stop(run: Path, now: bool, timeout_seconds: float) -> None:
    """Interrupt the driver, as Ctrl-C does, and wait until it has ended."""
    found = _going_on(run)
    if found is None:
        return
    if not found.is_here:
        raise UserInputError(
            f"its driver runs on {found.values.host}", where=str(run), hint="run this command on that machine"
        )
    found.interrupt()
    if now:
        time.sleep(1.0)
        if found.is_running:
            found.interrupt()
    _wait(found, timeout_seconds)
    _say(f"{run}: stopped")


def _going_on(run: Path) -> RunningJob | None:
    """The run's state; prints a message and returns None where none is running. Removes a killed driver's file."""
    found = read_status(run)
    if found is None:
        _say(f"{run}: no detached run is going on")
    elif found.clear():
        _say(
            f"{run}: no detached run is going on; its driver (pid {found.driver_pid}) was killed, and the "
            f"{found.path.name} that it left is removed. rlhf train --output {run} --resume auto continues it"
        )
        return None
    return found


def _wait(found: RunningJob, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while found.is_running:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for the driver (pid {found.driver_pid}) to end",
                where="rlhf ray stop",
                hint="an episode may take longer; --now does not wait for it",
            )
        time.sleep(0.2)


def _say(text: str, *, err: bool = False) -> None:
    click.echo(printable(text), err=err)
