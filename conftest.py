"""For every test: how fast an example runs is the machine's affair, runs draw no plots, no process is left.

Nothing waits for the disk either: what a power cut would take is not what tests look at.
"""

import gc
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["shared_fixtures"]  # of tests/support
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


RAY = "plugins/transports/ray/tests/"
QUICK_CASES = {
    "test_importing_it_is_light": "TestGrpo",
    "test_scores_in_a_process_of_its_own": "TestLength",
    "test_it_plays_in_a_process_of_its_own": "TestTools",
}
"""Laws of the contracts that start a process, and the class that is not slow. (test_imports.py imports all plugins.)"""


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files come first: were they last, one of several processes would end long after the others."""
    unknown = mark_slow(items)
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow_except names cases that are not there: {unknown}")
    runs, quick = {"integration", "ray", "strategies"}, {"unit", "architecture"}
    items.sort(key=lambda item: (runs.isdisjoint(item.path.parts), not quick.isdisjoint(item.path.parts)))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files are distributed over processes. Those of the Ray transport stay together, which share one Ray."""
    from xdist.scheduler import LoadFileScheduling

    class OneRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return RAY if nodeid.startswith(RAY) else super()._split_scope(nodeid)

    return OneRay(config, log) if config.getoption("dist") == "loadfile" else None


def mark_slow(items: list[pytest.Item]) -> dict[str, set[str]]:
    """`slow_except("a", "b")` marks all cases of a test slow but these. Returns those that were not collected."""
    missing: dict[str, set[str]] = {}
    for item in items:
        for mark in item.iter_markers("slow_except"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            missing.setdefault(test, set(mark.args)).discard(case)
            if case not in mark.args:
                item.add_marker("slow")
        law, owner = getattr(item, "originalname", None), getattr(item, "cls", None)
        if law in QUICK_CASES and getattr(owner, "__name__", None) != QUICK_CASES[law]:
            item.add_marker("slow")
    return {test: cases for test, cases in missing.items() if cases}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays, so that no search for garbage looks at its half a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """What the tests of this process start has its mark; what of it runs at the end is ended, and an error."""
    from running import MARK, command_line, kill, marked

    own = uuid.uuid4().hex
    os.environ[MARK] = own
    # Ray kills actors where the whole machine is short of memory, whoever took it.
    os.environ.update(RAY_memory_monitor_refresh_ms="0")

    def serves_this_process(line: str) -> bool:
        """Until its end: what Python itself starts, and the watch over Python's lock."""
        return "from multiprocessing." in line or ("lock_watch.py" in line and f" {os.getpid()} " in line)

    def left() -> list[psutil.Process]:
        return [process for process in marked(own) if not serves_this_process(command_line(process))]

    yield
    grace = time.monotonic() + 60.0  # a Ray that was shut down ends its last processes by itself
    while left() and time.monotonic() < grace:
        time.sleep(0.2)
    said = [command_line(process) for process in left()]
    kill(left)
    assert not said, f"left running by the tests: {said}"


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Fifty times a tiny run would wait for the disk, which may take longer than all else it does."""
    from running import fsync_of_pipes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync_of_pipes)
        yield


@pytest.fixture(autouse=True)
def secrets_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process remembers each secret, and hides it everywhere: a made-up one may be a word of a later test."""
    from rlhf_core.util import redact

    monkeypatch.setattr(redact, "_known", dict(redact._known))


@pytest.fixture(autouse=True)
def products_as_before() -> Iterator[None]:
    """Once a large model has run, the process has a choice of matrix products, and each later run records it."""
    yield
    if "rlhf_passes.products" in sys.modules:
        sys.modules["rlhf_passes.products"]._CHOICE.__init__()


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command sends its log to a stream that is closed after the test."""
    log = logging.getLogger("rlhf")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers = handlers
    if log.level != level:  # setting it empties the caches of all loggers
        log.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def cheap_records() -> Iterator[None]:
    """Versions of libraries are read once, and configs have no text, which transformers makes for a log that is off."""
    with pytest.MonkeyPatch.context() as patch:
        if (transformers := sys.modules.get("transformers.configuration_utils")) is not None:
            patch.setattr(transformers.PreTrainedConfig, "__repr__", object.__repr__)
        if (record := sys.modules.get("rlhf_core.entry.run_record")) is not None:
            patch.setattr(record, "version", cache(record.version))
        yield


@pytest.fixture(scope="session")
def ray_worker_source(nothing_is_left_running: None) -> Iterator[None]:
    """A Ray that is started with `quick_ray.quick_workers` has its workers forked, seconds sooner."""
    from quick_ray import worker_source

    with worker_source():
        yield


@pytest.fixture(scope="session", autouse=True)
def no_plots() -> Iterator[Callable[..., Path] | None]:
    """Runs of this process write no report: its plots take longer than a tiny run, and have tests of their own."""
    if find_spec("rlhf_report") is None:
        yield None
        return
    import rlhf_report

    with pytest.MonkeyPatch.context() as patch:
        written = rlhf_report.build_report
        patch.setattr(rlhf_report, "build_report", lambda folders: None)
        yield written


@pytest.fixture(scope="session")
def with_plots(no_plots: Callable[..., Path] | None) -> Callable[[], AbstractContextManager[None]]:
    """Inside `with with_plots():` runs write their report all the same."""

    @contextmanager
    def drawing() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlhf_report.build_report", no_plots)
            yield

    return drawing
