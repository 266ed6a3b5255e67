"""Hostile programs in the sandbox: everything it promises holds, as root and as an ordinary user."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attacks import ATTACKS, PRELUDE
from running import PATIENCE_SECONDS

import rlhf_containment.sandbox as package
from rlhf_containment.sandbox import Limits, SandboxError, missing, run_program
from rlhf_containment.sandbox import run as run_module
from rlhf_containment.sandbox.folder import remove_tree

LIMITS = Limits(
    timeout_seconds=20.0,
    cpu_seconds=1,
    memory_bytes=200 * 2**20,
    max_processes=16,
    max_output_bytes=2**17,
    max_file_bytes=2**23,
    max_folder_bytes=2**24,
    max_files=2000,
)
NO_NAMESPACES = """
import sys; sys.path.append(sys.argv[1])
from inside import kernel, syscall_filter
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1); syscall_filter.install()
"""
OLD_LANDLOCK = """
import sys; sys.path.append(sys.argv[1])
from inside import landlock
landlock.version = lambda: 3
"""
FAILING_WATCHER = """
import sys; sys.path.append(sys.argv[1])
from inside import watch
def fail(*arguments, **named): raise OSError(24, "Too many open files")
watch._processes = fail
"""
FAILING_FORK = """
import os
def fail(): raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fail
"""
OLD_LANDLOCK_ATTACKS = ("signal the parent", "signal the parent by other ways", "truncate outside", "write outside")
SHORT = Limits(timeout_seconds=0.5, cpu_seconds=10)
USER = 54321
DRIVER = """
import json, sys
sys.path.append(sys.argv[1])
from sandbox import Limits, SandboxError, missing, run_program
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
job = json.load(sys.stdin)
if job["before"]:
    import sandbox.run
    sandbox.run._BOOTSTRAP = job["before"] + sandbox.run._BOOTSTRAP
why = missing(job["mode"])
def run(source):
    limits = Limits(**job["short" if source[1] else "limits"])
    return asdict(run_program(source[0], "", limits, mode=job["mode"]))
with ThreadPoolExecutor(4) as pool:
    print(json.dumps({"missing": why, "results": [] if why else list(pool.map(run, job["sources"]))}))
"""


@pytest.fixture(scope="module")
def outside():
    """What the programs try to reach: a private file, an open folder, sockets, and this process."""
    with (
        tempfile.TemporaryDirectory(prefix="outside-") as name,
        socket.create_server(("127.0.0.1", 0)) as inet,
        socket.socket(socket.AF_UNIX) as path_socket,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "secret").write_text("key")
        (folder / "secret").chmod(0o600)
        (folder / "open").write_text("open")
        (folder / "open").chmod(0o666)
        if os.geteuid() == 0:
            os.chown(folder / "open", USER, USER)  # one of those who run programs below
        datagrams.bind(str(folder / "datagrams"))
        (folder / "datagrams").chmod(0o600)
        if os.geteuid() == 0:
            os.chown(folder / "datagrams", USER, USER)
        before = (folder / "open").stat()
        path_socket.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        path_socket.listen()
        abstract.bind(f"\0rlhf-attack-{os.getpid()}")
        abstract.listen()
        yield {
            "SECRET": str(folder / "secret"),
            "OPEN_FILE": str(folder / "open"),
            "FOLDER": name,
            "PORT": str(inet.getsockname()[1]),
            "SOCKET": str(folder / "socket"),
            "DATAGRAMS": str(folder / "datagrams"),
            "ABSTRACT": f"rlhf-attack-{os.getpid()}",
            "PID": str(os.getpid()),
            "MARK": f"86400.{os.getpid()}",
        }
        assert {each.name for each in folder.iterdir()} == {"secret", "open", "socket", "datagrams"}
        assert (folder / "open").stat() == before
        assert (folder / "open").read_text() == "open" and (folder / "secret").read_text() == "key"


def filled(source, outside):
    for name, value in outside.items():
        source = source.replace(f"@{name}@", value)
    return PRELUDE + source


def is_short(attack):
    return attack.expect == "time"


def failing(name, attack, result):
    """Why what came of an attack is not what has to; None where it is."""
    output = result["output"]
    said = output + result["error_output"]
    if "BROKEN" in said:
        return f"{name}: {said}"
    held = "held" in output
    fits = {
        "held": held and not result["stopped_for"],
        "ran": output.endswith("done\n") and result["exit_code"] == 0,
        "exit 3": held and result["exit_code"] == 3,
    }.get(attack.expect, result["stopped_for"] == attack.expect)
    if (
        attack.expect == "processor"
        and not result["stopped_for"]
        and result["exit_code"] in (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
    ):
        fits = True  # in the weaker mode the kernel ends it, which has no name for why
    return None if fits else f"{name}: {result}"


def check(attacks, results, outside):
    failures = [failing(name, attack, each) for (name, attack), each in zip(attacks, results, strict=True)]
    assert not (found := [each for each in failures if each]), "\n".join(found)
    assert outside["MARK"].encode() not in b"".join(command_lines())
    folders = Path(tempfile.gettempdir()).glob("rlhf-sandbox-*")
    assert not [each for each in folders if (each / "work" / "d").exists()]


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue  # it ended meanwhile


def chosen(mode):
    return [(name, attack) for name, attack in ATTACKS.items() if getattr(attack, mode)]


@pytest.mark.parametrize("mode", ["namespaces", "landlock"])
@pytest.mark.slow_except("landlock")
def test_as_who_runs_the_tests(mode, outside, monkeypatch):
    if why := missing(mode):
        pytest.skip(why)
    monkeypatch.setenv("ATTACK_SECRET", "key")
    attacks = chosen(mode)
    inherited = os.open(outside["SECRET"], os.O_RDWR)
    os.set_inheritable(inherited, True)

    def run(attack):
        result = run_program(filled(attack.source, outside), "", SHORT if is_short(attack) else LIMITS, mode=mode)
        return {name: getattr(result, name) for name in result.__slots__}

    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(run, [attack for _, attack in attacks]))
    finally:
        os.close(inherited)
    check(attacks, results, outside)


ELSEWHERE = {
    "a user, namespaces": ("namespaces", USER, ""),
    "a user, landlock": ("landlock", USER, ""),
    "a user, landlock of Linux 6.2": ("landlock", USER, OLD_LANDLOCK),
    "root, landlock": ("landlock", 0, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "user", "before"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_as_others_with_an_interpreter_that_all_may_run(mode, user, before, outside):
    if os.geteuid() != 0:
        pytest.skip("only root may become somebody else")
    interpreter = next(
        (each for each in (sys.executable, shutil.which("python3", path=os.defpath)) if runs(each)), None
    )
    if interpreter is None:
        pytest.skip("no Python here that an ordinary user may start")
    attacks = [each for each in chosen(mode) if not before or each[0] in OLD_LANDLOCK_ATTACKS]
    job = {
        "mode": mode,
        "before": before,
        "limits": {name: getattr(LIMITS, name) for name in LIMITS.__slots__},
        "short": {name: getattr(SHORT, name) for name in SHORT.__slots__},
        "sources": [(filled(attack.source, outside), is_short(attack)) for _, attack in attacks],
    }
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(Path(package.__file__).parent, Path(folder) / "sandbox")
        driver = subprocess.run(
            [interpreter, "-I", "-B", "-c", DRIVER, folder],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            user=user,
            group=user,
            extra_groups=[],
            env={"ATTACK_SECRET": "key"},
            cwd="/",
        )
    assert driver.returncode == 0, driver.stderr
    answer = json.loads(driver.stdout)
    if answer["missing"]:
        pytest.skip(answer["missing"])
    check(attacks, answer["results"], outside)


def runs(interpreter):
    """Whether an ordinary user may start this interpreter, and it is new enough."""
    if interpreter is None:
        return False
    new_enough = [interpreter, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
    try:
        return subprocess.run(new_enough, user=USER, group=USER, extra_groups=[], cwd="/").returncode == 0
    except PermissionError:
        return False


def test_a_program_ends_with_the_run_that_is_killed():
    if why := missing():
        pytest.skip(why)
    mark = f"86401.{os.getpid()}"
    program = f"import os\nos.fork() or os.setsid()\nos.execvp('sleep', ['sleep', '{mark}'])"
    limits = "Limits(timeout_seconds=600, cpu_seconds=60)"
    source = f"from rlhf_containment.sandbox import *; run_program({program!r}, '', {limits})"
    with subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, text=True) as caller:
        caller.stdin.write(source)
        caller.stdin.close()
        wait_until(lambda: mark.encode() in b"".join(command_lines()))
        caller.kill()
    wait_until(lambda: mark.encode() not in b"".join(command_lines()))


def wait_until(happened):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_programs_share_no_folder():
    if why := missing():
        pytest.skip(why)
    with ThreadPoolExecutor(2) as pool:
        source = "import os, time; open('mine', 'xb').close(); time.sleep(0.3); print(os.listdir('.'))"
        outputs = [each.output for each in pool.map(run_program, [source] * 2)]
    assert outputs == ["['mine']\n"] * 2


def test_a_caller_of_the_lowest_priority_runs_programs_too():
    """A program is given a low priority, and raising one is refused."""
    if why := missing():
        pytest.skip(why)
    source = "from rlhf_containment.sandbox import *; print(run_program('import os; print(os.nice(0))').output, end='')"
    ran = [
        subprocess.check_output(
            ["nice", "-n", given, sys.executable, "-c", source], text=True, timeout=PATIENCE_SECONDS
        )
        for given in ("0", "19")
    ]
    assert ran == ["10\n", "19\n"]


def test_a_folder_of_any_depth_is_removed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(outside)
    (top / "file").write_text("")
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.fchmod(descriptor, 0)
    os.close(descriptor)
    remove_tree(str(top))
    assert not top.exists() and (outside / "kept").read_text() == "kept"


def test_a_machine_that_gives_nothing_is_refused_and_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(run_module, "_BOOTSTRAP", NO_NAMESPACES + run_module._BOOTSTRAP)
    with pytest.raises(SandboxError, match=r"lacks: user namespaces \(Operation not permitted\)"):
        run_program("print('ran')")


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        (FAILING_WATCHER, "OSError(24, 'Too many open files')"),
        (FAILING_FORK, "BlockingIOError(11, 'Resource temporarily unavailable')"),
    ],
    ids=["watcher", "fork"],
)
def test_what_fails_around_a_program_is_a_failure_of_that_program_only(monkeypatch, fails, error):
    if why := missing():
        pytest.skip(why)
    monkeypatch.setattr(run_module, "_BOOTSTRAP", fails + run_module._BOOTSTRAP)
    result = run_program("import time; time.sleep(1000)")
    assert not result.succeeded and not result.stopped_for
    assert f"the process that watches the program failed: {error}" in result.error_output
