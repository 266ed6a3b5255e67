"""`rlhf ray status RUN`, `rlhf ray scale RUN --makers N` and `rlhf ray stop RUN`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from rlhf_core.errors import DeadlineError, RlhfError, UserInputError
from rlhf_core.util import printable

from .driver_files import MOST_MAKERS, STATUS, Request, Status, clear_request, read_status

_TAKE_SECONDS = 60.0
"""Longest time for the driver to take a request, and to end what it began."""

_RUN = click.argument("run", type=click.Path(path_type=Path))


@click.group("ray", help="Look at a detached run, give it more or fewer makers, or stop it.")
def ray() -> None:
    """Group of the `rlhf ray` commands."""


@ray.command("status", help="What the actors of the run in folder RUN do.")
@_RUN
def status(run: Path) -> None:
    """Print the newest state as plain, uncut lines."""
    found = _going_on(run)
    if found is None:
        return
    age = time.time() - found.updated
    state = "running" if found.is_running(run) else "not heard of"
    _say(f"{run}: {state}, driver pid {found.driver_pid} on {found.host}, {age:.0f} s ago")
    _say(f"  Ray {found.address}, namespace {found.namespace}")
    _say(f"  policy version {found.version}; {found.progress}; {found.queue} finished prompts wait")
    for trainer in found.trainers:
        _say(f"  {trainer.name}  pid {trainer.pid}  {trainer.doing} since {trainer.for_s:g} s{_busy(trainer.busy)}")
    for maker in found.makers:
        restarts = f"  started anew {maker.restarts} times" if maker.restarts else ""
        weights = "no weights yet" if maker.version is None else f"version {maker.version}"
        made = f"  {maker.groups} prompts made, {maker.waiting} wait" if maker.groups else ""
        doing = f"{maker.doing} since {maker.for_s:g} s{_busy(maker.busy)}"
        _say(f"  {maker.name}  pid {maker.pid}  {doing}  {weights}{made}{restarts}")


@ray.command("scale", help="Give the running job in folder RUN so many makers, and wait until it has them.")
@_RUN
@click.option("--makers", type=click.IntRange(1, MOST_MAKERS), required=True, help="Makers that it is to have.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(min=0, min_open=True, max=604800),
    default=600.0,
    show_default=True,
    help="Seconds: added makers that have no room or have not started by then are given up.",
)
def scale(run: Path, makers: int, timeout_seconds: float) -> None:
    """Ask the driver, by a file in the run folder, and follow what it says."""
    found = _going_on(run)
    if found is None or not found.is_running(run):
        raise UserInputError(
            "no detached run is going on here, so nothing is changed",
            where=str(run),
            hint=f"rlhf train --output {run} --resume auto --set transport.num_makers={makers}",
        )
    asked = Request(do="scale", makers=makers, timeout_seconds=timeout_seconds)
    asked.send(run)
    deadline = time.monotonic() + timeout_seconds + _TAKE_SECONDS
    while (found := read_status(run)) is not None and found.is_running(run):
        answer = found.scaling
        if answer is not None and answer.id > asked.id:
            raise RlhfError("a later request took the place of this one", where=str(run))
        if answer is not None and answer.id == asked.id:
            if answer.problem:
                raise RlhfError(
                    answer.problem,
                    where=str(run),
                    hint=f"rlhf ray status {run} says what there is; ask for fewer makers, or add nodes and ask again",
                )
            _say(f"{run}: {makers} makers")
            return
        if time.monotonic() > deadline:
            clear_request(run)
            raise DeadlineError(
                f"waited {timeout_seconds + _TAKE_SECONDS:g} s for the driver (pid {found.driver_pid}) to do it",
                where="rlhf ray scale",
                hint=f"rlhf ray status {run} says what it does",
            )
        time.sleep(0.2)
    clear_request(run)
    raise RlhfError("the run ended before it had so many makers", where=str(run))


def _busy(share: float | None) -> str:
    return "" if share is None else f"  busy {share:.0%}"


@ray.command("stop", help="Stop the run in folder RUN: after the episode, with a checkpoint; --now at once.")
@_RUN
@click.option("--now", is_flag=True, help="Do not wait for the episode and a checkpoint.")
@click.option("--timeout", "timeout_seconds", type=float, default=600.0, show_default=True, help="Seconds to wait.")
def stop(run: Path, now: bool, timeout_seconds: float) -> None:
    """Ask the driver, by a file in the run folder, to do what Ctrl-C does, and wait until it has ended."""
    found = _going_on(run)
    if found is None:
        return
    if not found.is_running(run):
        silent = time.time() - found.updated
        raise UserInputError(
            f"its driver (pid {found.driver_pid} on {found.host}) has said nothing for {silent:.0f} s",
            where=str(run),
            hint="look for it on that machine",
        )
    Request(do="stop-now" if now else "stop").send(run)
    deadline = time.monotonic() + timeout_seconds
    while found is not None and found.is_running(run):
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for the driver (pid {found.driver_pid}) to end",
                where="rlhf ray stop",
                hint=f"it is stuck: kill {found.driver_pid} on {found.host}"
                if now
                else "an episode may take longer; --now does not wait for it",
            )
        time.sleep(0.2)
        found = found if found.is_here else read_status(run)
    clear_request(run)
    _say(f"{run}: stopped")


def _going_on(run: Path) -> Status | None:
    """The run's state; prints a message and returns None where none is running. Removes a killed driver's file."""
    found = read_status(run)
    if found is None:
        _say(f"{run}: no detached run is going on")
    elif found.is_here and not found.is_running(run):
        (run / STATUS).unlink(missing_ok=True)
        _say(
            f"{run}: no detached run is going on; its driver (pid {found.driver_pid}) was killed, and the "
            f"{STATUS} that it left is removed. rlhf train --output {run} --resume auto continues it"
        )
        return None
    return found


def _say(text: str) -> None:
    click.echo(printable(text))
