"""Makers that come and go while a run goes on, and what the command says."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner
from running import PATIENCE_SECONDS, wait_until

from rlhf_control.control_box import ControlBox, parse_command
from rlhf_core import train
from rlhf_core.errors import DeadlineError, InterruptedRun, RlhfError, UserInputError
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import write_json
from rlhf_ray.commands import ray as command
from rlhf_ray.driver_files import DriverRequest, Status, read_status, take_request

RunFile = Callable[..., dict[str, Any]]
CheckSamples = Callable[[Path], None]


@contextmanager
def while_it_runs(*steps: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Take the steps from another thread while the run goes on; what they raise is raised here in the end."""
    wrong: list[BaseException] = []

    def take() -> None:
        try:
            for step in steps:
                step()
        except BaseException as error:
            wrong.append(error)
            for held in Path(os.environ["RLHF_TEST_FAULTS"]).glob("trainer-waits"):
                held.unlink()  # nobody lets it go any more

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    yield wrong
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    if wrong:
        raise wrong[0]


def status(folder: Path) -> Status | None:
    return read_status(folder) if folder.is_dir() else None


def until(folder: Path, holds: Callable[[Status], bool], what: str) -> None:
    def there() -> bool:
        values = status(folder)
        return values is not None and holds(values)

    wait_until(there, what, every_seconds=0.1)


def write_status(folder: Path, **changes: Any) -> None:
    """As a driver that is this process."""
    about = {"driver_pid": os.getpid(), "host": socket.gethostname()}
    place = {"address": "127.0.0.1:1", "namespace": "rlhf", "updated": 1.0}
    state = {"version": 0, "progress": "episode 1", "trainers": [], "makers": []}
    write_json(folder / "ray.json", {**about, **place, **state, **changes})


def scaled(folder: Path, makers: int, *more: str) -> Any:
    return CliRunner().invoke(command, ["scale", str(folder), "--makers", str(makers), *more])


def ended(folder: Path, what: str) -> bool:
    return what in (folder / "run.log").read_text()


@pytest.mark.usefixtures("local_ray")
class TestRuns:
    @pytest.mark.slow
    def test_makers_come_and_go_and_no_sample_is_lost_or_doubled(
        self,
        tmp_path: Path,
        run_file: RunFile,
        faults: Callable[[str], Path],
        check_samples: CheckSamples,
    ) -> None:
        """One comes and makes prompts, others find no room, the last goes; the numbers are the local run's."""
        local = train(run_file({"episodes": 4}), output=tmp_path / "local")
        folder = tmp_path / "ray"
        held = faults("trainer-waits")
        said: list[Any] = []

        def steps() -> None:
            until(folder, lambda values: values.makers != [] and values.makers[0].version is not None, "a maker")
            said.append(scaled(folder, 2))
            shown = CliRunner().invoke(command, ["status", str(folder)]).output
            assert "maker-1" in shown and "trains on episode 1" in shown, shown
            said.append(scaled(folder, 5 * (os.cpu_count() or 1)))
            said.append(scaled(folder, 1))
            held.unlink()

        run = run_file({"episodes": 4}, max_staleness=0, prompts_per_lease=2, maker_cpus=0.3)
        with while_it_runs(steps):
            result = train(run, output=folder)
        assert [each.exit_code for each in said] == [0, 1, 0], [each.output for each in said]
        assert "2 makers" in said[0].output and "1 makers" in said[2].output
        assert re.search(
            r"for \d+ more makers are missing: they reserve [\d.]+ CPU .* have \d+ CPU", str(said[1].exception)
        )
        check_samples(folder)
        assert ended(folder, "maker-1 was stopped, ")
        assert result is not None and local is not None
        for ours, theirs in zip(result.metrics, local.metrics, strict=True):
            assert ours["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-5)
        cpus = ray.cluster_resources()["CPU"]
        wait_until(lambda: ray.available_resources().get("CPU") == cpus, "all room to be given back")

    @pytest.mark.slow
    def test_an_added_maker_that_is_killed_is_replaced_and_the_run_can_be_resumed(
        self,
        tmp_path: Path,
        run_file: RunFile,
        ways: dict[str, Any],
        faults: Callable[[str], Path],
        check_samples: CheckSamples,
    ) -> None:
        """With work, or while it loads: then the run goes on without. A resume has as many as its run file says."""
        folder = tmp_path / "ray"
        held = faults("trainer-waits")

        def steps() -> None:
            until(folder, lambda values: values.makers != [] and values.makers[0].version is not None, "a maker")
            assert scaled(folder, 2).exit_code == 0
            kill("maker-1")
            wait_until(lambda: ended(folder, "maker-1 is restarted"), "another in its place")
            until(folder, lambda values: any(each.name == "maker-1.1" and each.pid for each in values.makers), "it")
            asked = DriverRequest(do="scale", makers=3)
            asked.send(folder)
            until(folder, lambda values: len(values.makers) == 3, "a third")
            kill("maker-2")
            until(folder, lambda values: getattr(values.scaling, "id", "") == asked.id, "an answer")
            found = status(folder)
            assert found is not None and found.scaling is not None and len(found.makers) == 2
            assert "maker-2 did not start" in found.scaling.problem
            held.unlink()
            ControlBox(folder / "control").send(parse_command(["stop"]))

        run = run_file({"episodes": 30}, **{"max_staleness": 1, "prompts_per_lease": 2, **ways})
        with while_it_runs(steps), pytest.raises(InterruptedRun):
            train(run, output=folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        run["train"]["episodes"] = lines[-1]["episode"] + 3
        assert train(run, output=folder, resume="auto") is not None
        check_samples(folder)

    @pytest.mark.slow
    def test_a_maker_that_is_ended_gives_its_prompts_back(
        self,
        tmp_path: Path,
        run_file: RunFile,
        ways: dict[str, Any],
        faults: Callable[[str], Path],
        check_samples: CheckSamples,
    ) -> None:
        """Its samples wait for a trainer that is held; they are made again, the same."""
        folder = tmp_path / "ray"
        held = faults("trainer-waits")

        def steps() -> None:
            until(folder, lambda values: any("trains on" in each.doing for each in values.trainers), "an update")
            until(folder, lambda values: sum(each.waiting > 0 for each in values.makers) == 2, "samples of both")
            assert scaled(folder, 1).exit_code == 0
            held.unlink()

        with while_it_runs(steps):
            options = {"num_makers": 2, "prompts_per_lease": 1, **ways, "max_staleness": 2}
            train(run_file({"episodes": 4}, **options), output=folder)
        check_samples(folder)
        found = re.search(r"maker-1 was stopped, (\d+) of its prompts", (folder / "run.log").read_text())
        assert found is not None and int(found[1]) > 0


def kill(name: str) -> None:
    (found,) = [each for each in ray.util.list_named_actors(all_namespaces=True) if each["name"] == name]
    ray.kill(ray.get_actor(**found))


class TestCommand:
    """What it says; a thread is the driver."""

    @pytest.fixture
    def held(self, tmp_path: Path) -> Iterator[None]:
        """The folder is a running driver's."""
        with RunFolder.take(tmp_path):
            yield

    @pytest.fixture
    def answers(self, tmp_path: Path, held: None) -> Iterator[Callable[..., None]]:
        """`answers(problem)`: what the driver answers to the next request."""
        stop, threads = threading.Event(), []
        write_status(tmp_path)

        def answer(problem: str, **changes: Any) -> None:
            def drive() -> None:
                while not stop.wait(0.02):
                    if (request := take_request(tmp_path)) is not None:
                        told = {"id": request.id, "problem": problem, **changes}
                        write_json(tmp_path / "ray.json", {**shown, "scaling": told})
                        return

            shown = json.loads((tmp_path / "ray.json").read_text())
            threads.append(threading.Thread(target=drive, daemon=True))
            threads[-1].start()

        yield answer
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)

    def test_done(self, tmp_path: Path, answers: Callable[..., None]) -> None:
        answers("")
        said = scaled(tmp_path, 3)
        assert (said.exit_code, said.output) == (0, f"{tmp_path}: 3 makers\n")

    def test_refused(self, tmp_path: Path, answers: Callable[..., None]) -> None:
        answers("resources are missing")
        error = scaled(tmp_path, 3).exception
        assert isinstance(error, RlhfError) and "are missing" in str(error) and "rlhf ray status" in str(error)

    def test_a_later_request_takes_its_place(self, tmp_path: Path, answers: Callable[..., None]) -> None:
        answers("", id="9")
        assert "a later request" in str(scaled(tmp_path, 3).exception)

    def test_a_driver_that_does_nothing(self, tmp_path: Path, held: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlhf_ray.commands._TAKE_SECONDS", 0.1)
        write_status(tmp_path)
        error = scaled(tmp_path, 3, "--timeout", "0.1").exception
        assert isinstance(error, DeadlineError)
        assert not (tmp_path / "ray-request.json").exists()

    def test_no_run_goes_on(self, tmp_path: Path) -> None:
        error = scaled(tmp_path, 3).exception
        assert isinstance(error, UserInputError)
        assert "--resume auto --set transport.num_makers=3" in str(error)
        write_status(tmp_path, host="elsewhere")  # not heard of for long
        assert isinstance(scaled(tmp_path, 3).exception, UserInputError)
        assert not (tmp_path / "ray-request.json").exists()

    @pytest.mark.parametrize("makers", ["0", "-1", "1025", "two"])
    def test_no_such_number(self, tmp_path: Path, makers: str) -> None:
        said = CliRunner().invoke(command, ["scale", str(tmp_path), "--makers", makers])
        assert said.exit_code == 2
        assert "--makers" in said.output


class TestRequests:
    """The folder may be anyone's."""

    def test_a_request_is_taken_once(self, tmp_path: Path) -> None:
        sent = DriverRequest(do="scale", makers=3, timeout_seconds=5.0)
        sent.send(tmp_path)
        assert take_request(tmp_path) == sent
        assert take_request(tmp_path) is None

    @pytest.mark.parametrize(
        "text",
        [
            *("", "{}", "[" * 4000, "3", " " * 5000 + "{}", "\udcff"),
            '{"do": "scale", "id": "a", "makers": 0, "timeout_seconds": 5}',
            '{"do": "scale", "id": "a", "makers": true, "timeout_seconds": 5}',
            '{"do": "scale", "id": "a", "makers": 3, "timeout_seconds": NaN}',
            '{"do": "scale", "id": "a", "makers": 3, "timeout_seconds": 5, "run": "code"}',
            '{"do": "delete", "id": "a"}',
        ],
    )
    def test_what_is_no_request_is_removed(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "ray-request.json").write_text(text, errors="surrogateescape")
        assert take_request(tmp_path) is None
        assert not (tmp_path / "ray-request.json").exists()

    def test_a_link_a_pipe_and_anothers_file_are_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "ray-request.json"
        DriverRequest(do="stop").send(tmp_path)
        with monkeypatch.context() as other_user:
            other_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert take_request(tmp_path) is None
        path.rename(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
        assert take_request(tmp_path) is None
        path.unlink()
        os.mkfifo(path)
        assert take_request(tmp_path) is None
