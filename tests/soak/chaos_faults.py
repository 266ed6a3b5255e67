"""What strikes a session that goes on. Each function leaves it running, or ended as it should have."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import psutil
from chaos_chain import DONE, FAILED, KILLED, STOPPED, Chain, Missed, pause
from chaos_placement import HEARTBEAT_SECONDS
from chaos_session import Session, Wrong, count_lines, wait

from rlhf_control.control_box import ControlBox, parse_command
from rlhf_core.errors import RlhfError
from rlhf_core.runfolder.folder import RunFolder

_FULL = ("full", "No space left")


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# Processes that are killed or stopped


def parts(session: Session) -> dict[str, int]:
    """Processes of a session by name, the one that was started first."""
    found = {"the process": session.process.pid}
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(session.process.pid).children()
        forked = [each.pid for each in children if "forkserver" in " ".join(each.cmdline())]
        found |= {f"rank {number}": pid for number, pid in enumerate(forked)}
    kinds = {"ray::TrainerActor": "trainer", "ray::ExperienceMaker": "maker", "ray::Coordinator": "coordinator"}
    kinds |= {"raylet/raylet": "raylet", "gcs/gcs_server": "gcs"}
    for each in psutil.Process().children(recursive=True) if session.named("raylet/raylet") else ():
        with suppress(psutil.NoSuchProcess):
            line = " ".join(each.cmdline())[:200]
            found |= {kind: each.pid for beginning, kind in kinds.items() if beginning in line}
    return found


def _end_killed(chain: Chain) -> None:
    if chain.end(*KILLED, DONE) == DONE:  # it came to its end in the same moment
        raise Missed


def kill_the_process(chain: Chain) -> None:
    chain.alive().process.send_signal(signal.SIGKILL)
    _end_killed(chain)


def kill_all_at_once(chain: Chain) -> None:
    session = chain.alive()
    pids = [session.process.pid, *(each.pid for each in session.processes())]
    for pid in pids:
        _send(pid, signal.SIGKILL)
    _end_killed(chain)


def kill_a_part(chain: Chain) -> str:
    session = chain.alive()
    found = parts(session)
    others = [name for name in found if name != "the process"]
    if not others:
        raise Missed
    name = chain.chance.choice(others)
    _send(found[name], signal.SIGKILL)
    if name != "maker":  # another takes its place
        chain.end(FAILED, DONE)
    return name


def freeze_for_a_moment(chain: Chain) -> str:
    found = parts(chain.alive())
    name = chain.chance.choice(sorted(found))
    _send(found[name], signal.SIGSTOP)
    pause(chain.chance, 0.4)
    _send(found[name], signal.SIGCONT)
    return name


def freeze_for_good(chain: Chain) -> str:
    """The process itself is killed at last; a rank or an actor is given up by the others."""
    found = parts(chain.alive())
    others = [name for name in found if name in ("rank 0", "rank 1", "trainer", "maker")]
    name = chain.chance.choice(others or ["the process"])
    _send(found[name], signal.SIGSTOP)
    if not others:
        pause(chain.chance, 0.1)
        return freeze_and_kill(chain, name)
    if name == "maker":
        wait(lambda: chain.alive().is_over or not psutil.pid_exists(found[name]), "another maker", every=0.05)
    else:
        chain.end(FAILED, DONE)
    return name


def freeze_and_kill(chain: Chain, name: str) -> str:
    kill_the_process(chain)
    return name


# Signals that ask it to stop


def _stop_signal(chain: Chain) -> signal.Signals:
    """One of those that a terminal or a scheduler sends; where the tests were started by `nohup`, without SIGHUP."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return chain.chance.choice([signal.SIGINT, signal.SIGTERM, *hang_up])


def terminate(chain: Chain, times: int) -> str:
    session = chain.alive()
    if not session.wait_for(session.owns_the_folder, "its lock"):
        raise Missed
    sent = []
    for _ in range(times):
        number = _stop_signal(chain)
        session.process.send_signal(number)
        sent.append(number.name)
        pause(chain.chance, 0.05)
    chain.end(*STOPPED)
    return ", ".join(sent)


def terminate_once(chain: Chain) -> str:
    return terminate(chain, 1)


def terminate_twice(chain: Chain) -> str:
    return terminate(chain, 2)


def terminate_again_and_again(chain: Chain) -> str:
    return terminate(chain, chain.chance.randint(3, 6))


# A second driver


def second_driver(chain: Chain) -> None:
    """The first is held for the time, so that it cannot be over meanwhile."""
    session = chain.alive()
    if not session.wait_for(session.owns_the_folder, "its lock"):
        raise Missed
    session.process.send_signal(signal.SIGSTOP)
    try:
        other = chain.root / "other"
        other.mkdir(exist_ok=True)
        second = Session(other, chain.folder, chain.placement, *chain.flags())
        try:
            second.end((2, "before"), (2, "done"))
        finally:
            second.kill()
        if "another process" not in second.error and "already contains a run" not in second.error:
            raise Wrong(f"the second driver was refused by {second.error}")
    finally:
        session.process.send_signal(signal.SIGCONT)


# A full disk


def full_disk_for_good(chain: Chain) -> None:
    assert chain.disk is not None
    session = chain.alive()
    chain.disk.fill()
    try:
        ended = session.end(DONE, FAILED, (1, "before"), (2, "before"))
    finally:
        chain.disk.free()
    if ended != DONE and not any(word in session.error for word in _FULL):
        raise Wrong(f"the error does not name the full disk: {session.error}")
    chain.end(ended)


def full_disk_for_a_moment(chain: Chain) -> None:
    assert chain.disk is not None
    chain.disk.fill()
    pause(chain.chance, 0.2)
    chain.disk.free()
    chain.end(DONE, FAILED, (1, "before"), (2, "before"))


# A reward that misbehaves


def hung_reward(chain: Chain) -> None:
    (chain.root / "hang").touch()
    chain.end(FAILED, DONE)


def hung_reward_terminated(chain: Chain) -> None:
    """Twice: the first waits for the episode."""
    (chain.root / "hang").touch()
    pause(chain.chance, 1.0)
    session = chain.alive()
    for _ in range(2):
        session.process.send_signal(signal.SIGINT)
        pause(chain.chance, 0.5)
    chain.end(*STOPPED, FAILED)


def killed_reward(chain: Chain) -> str:
    """From outside, or by what it does itself, where it has a process of its own; it raises where it has none."""
    if not chain.is_isolated:
        (chain.root / "raise").touch()
        how = "it raises"
    elif chain.chance.random() < 0.5 and (workers := chain.alive().named("rlhf_containment.rewards.worker")):
        _send(chain.chance.choice(workers).pid, signal.SIGKILL)
        how = "killed from outside"
    else:
        (chain.root / "die").touch()
        how = "it kills itself"
    chain.end(FAILED, DONE)
    return how


# Commands


def _command(chain: Chain, text: str) -> str:
    """The run's answer. Raises `Missed` where it is over before it takes the command."""
    folder = RunFolder(chain.folder)
    box = ControlBox(folder.control)
    session = chain.alive()
    if not session.wait_for(session.has_begun, "its summary"):
        raise Missed
    try:
        return box.wait(
            box.send(parse_command(text.split())),
            seconds=HEARTBEAT_SECONDS * 5,
            is_running=lambda: folder.is_in_use and not session.is_over,
        )
    except RlhfError as error:
        if "ended before" not in str(error):
            raise Wrong(f"control {text}: {error}") from error
        chain.end(DONE)
        raise Missed from error


def control_goes_on(chain: Chain) -> str:
    """Commands after which the run is what it would have been."""
    text = chain.chance.choice(["checkpoint", "set lr=0.001", "resume", "set kl_coef=0.05"])
    _command(chain, text)
    return text


def control_pause(chain: Chain) -> str:
    _command(chain, "pause")
    lines = chain.folder / "metrics.jsonl"
    before = count_lines(lines)
    pause(chain.chance, 0.3)
    if count_lines(lines) != before:
        raise Wrong("a paused run went on")
    session = chain.alive()
    after = chain.chance.choice(["resume", "terminate", "kill", "stop"])
    if after == "terminate":
        session.process.send_signal(_stop_signal(chain))
        chain.end(*STOPPED)
    elif after == "kill":
        kill_the_process(chain)
    else:
        _command(chain, after)
    if after == "stop":
        chain.end(*STOPPED)
    return f"pause, {after}"


def control_stop(chain: Chain) -> None:
    _command(chain, "stop")
    chain.end(*STOPPED)


Strike = Callable[[Chain], str | None]
