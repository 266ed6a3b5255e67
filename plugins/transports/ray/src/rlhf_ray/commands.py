"""`rlhf ray status RUN`, `rlhf ray scale RUN --makers N` and `rlhf ray stop RUN`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from rlhf_core.errors import DeadlineError, RlhfError, UserInputError
from rlhf_core.util import printable

from .driver_files import MAX_MAKERS, STATUS, DriverRequest, Status, clear_request, read_status

_TAKE_SECONDS = 60.0
"""Grace period for the driver to read a request and to finish its work on it."""

_RUN = click.argument("run", type=click.Path(path_type=Path))


@click.group("ray", help="Inspect a detached run, change its number of makers, or stop it.")
def ray() -> None:
    """Group the `rlhf ray` commands."""


@ray.command("status", help="Show the activity of each actor of the run in folder RUN.")
@_RUN
def status(run: Path) -> None:
    """Print the latest state as plain lines, without truncation."""
    driver = _find_run(run)
    if driver is None:
        return
    age = time.time() - driver.updated
    state = "running" if driver.is_running(run) else "not responding"
    _print(f"{run}: {state}, driver pid {driver.driver_pid} on {driver.host}, {age:.0f} s ago")
    _print(f"  Ray {driver.address}, namespace {driver.namespace}")
    _print(f"  policy version {driver.version}, {driver.progress}, {driver.queue} finished prompts wait")
    for trainer in driver.trainers:
        doing = f"{trainer.doing} (for {trainer.for_s:g} s){_busy(trainer.busy)}"
        _print(f"  {trainer.name}  pid {trainer.pid}  {doing}{_restarts(trainer.restarts)}")
    for maker in driver.makers:
        weights = "no weights yet" if maker.version is None else f"version {maker.version}"
        finished = f"  {maker.groups} prompts finished, {maker.waiting} wait" if maker.groups else ""
        doing = f"{maker.doing} (for {maker.for_s:g} s){_busy(maker.busy)}"
        _print(f"  {maker.name}  pid {maker.pid}  {doing}  {weights}{finished}{_restarts(maker.restarts)}")


@ray.command("scale", help="Set the number of makers of the running job in folder RUN, and wait until it has them.")
@_RUN
@click.option("--makers", type=click.IntRange(1, MAX_MAKERS), required=True, help="Number of makers.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(min=0, min_open=True, max=604800),
    default=600.0,
    show_default=True,
    help="Seconds after which added makers that lack resources or have not started are given up.",
)
def scale(run: Path, makers: int, timeout_seconds: float) -> None:
    """Send the driver a request, by a file in the run folder, and wait for its answer."""
    driver = _find_run(run)
    if driver is None or not driver.is_running(run):
        raise UserInputError(
            "no detached run is active here, so nothing was changed",
            where=str(run),
            hint=f"rlhf train --output {run} --resume auto --set transport.num_makers={makers}",
        )
    request = DriverRequest(do="scale", makers=makers, timeout_seconds=timeout_seconds)
    request.send(run)
    deadline = time.monotonic() + timeout_seconds + _TAKE_SECONDS
    while (driver := read_status(run)) is not None and driver.is_running(run):
        answer = driver.scaling
        if answer is not None and answer.id > request.id:
            raise RlhfError("a later request replaced this one", where=str(run))
        if answer is not None and answer.id == request.id:
            if answer.problem:
                raise RlhfError(
                    answer.problem,
                    where=str(run),
                    hint=f"rlhf ray status {run} shows the makers. Request fewer, or add nodes and try again",
                )
            _print(f"{run}: {makers} makers")
            return
        if time.monotonic() > deadline:
            clear_request(run)
            raise DeadlineError(
                f"waited {timeout_seconds + _TAKE_SECONDS:g} s for the driver (pid {driver.driver_pid}) to do it",
                where="rlhf ray scale",
                hint=f"rlhf ray status {run} shows its activity",
            )
        time.sleep(0.2)
    clear_request(run)
    raise RlhfError("the run ended before it had that number of makers", where=str(run))


def _restarts(count: int) -> str:
    return f"  restarted {count} times" if count else ""


def _busy(share: float | None) -> str:
    return "" if share is None else f"  busy {share:.0%}"


@ray.command("stop", help="Stop the run in folder RUN after its episode with a checkpoint, or with --now immediately.")
@_RUN
@click.option("--now", is_flag=True, help="Do not wait for the episode and a checkpoint.")
@click.option("--timeout", "timeout_seconds", type=float, default=600.0, show_default=True, help="Seconds to wait.")
def stop(run: Path, now: bool, timeout_seconds: float) -> None:
    """Request the effect of Ctrl-C, by a file in the run folder, and wait until the driver has ended."""
    driver = _find_run(run)
    if driver is None:
        return
    if not driver.is_running(run):
        silent = time.time() - driver.updated
        raise UserInputError(
            f"its driver (pid {driver.driver_pid} on {driver.host}) has not responded for {silent:.0f} s",
            where=str(run),
            hint="look for it on that machine",
        )
    DriverRequest(do="stop-now" if now else "stop").send(run)
    deadline = time.monotonic() + timeout_seconds
    while driver is not None and driver.is_running(run):
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for the driver (pid {driver.driver_pid}) to end",
                where="rlhf ray stop",
                hint=f"it is stuck: kill {driver.driver_pid} on {driver.host}"
                if now
                else "an episode may take longer, and --now does not wait for it",
            )
        time.sleep(0.2)
        driver = driver if driver.is_here else read_status(run)
    clear_request(run)
    _print(f"{run}: stopped")


def _find_run(run: Path) -> Status | None:
    """Return the run's state, or print a message and return None if none is active. Removes a killed driver's file."""
    driver = read_status(run)
    if driver is None:
        _print(f"{run}: no detached run is active")
    elif driver.is_here and not driver.is_running(run):
        (run / STATUS).unlink(missing_ok=True)
        _print(
            f"{run}: no detached run is active. Its driver (pid {driver.driver_pid}) was killed, and its {STATUS} "
            f"has been removed. rlhf train --output {run} --resume auto continues it"
        )
        return None
    return driver


def _print(text: str) -> None:
    click.echo(printable(text))
