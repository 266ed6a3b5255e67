"""Model-written programs in the sandbox: what passes, and what each limit does."""

import contextlib
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_reward_rules import code_execution as module
from rlhf_reward_rules.code_execution import build, code_execution, network_can_be_cut, program_in
from rlhf_reward_rules.config import CodeExecutionConfig
from rlhf_reward_rules.sandbox import Limits, SandboxError, run_program

LIMITS = Limits(timeout_seconds=30.0, cpu_seconds=1)


def rollout(completion, answer=None, **metadata):
    return SimpleNamespace(sample_id=7, completion=completion, answer=answer, metadata=metadata)


def score(completion, answer=None, *, partial_credit=False, **metadata):
    sample = rollout(completion, answer, **metadata)
    return code_execution([sample], allow_execution=True, limits=LIMITS, partial_credit=partial_credit)[0]


def test_off_unless_asked_for():
    with pytest.raises(PermissionError, match="allow_execution: true"):
        code_execution([rollout("print(1)", "1")])
    with pytest.raises(ValueError, match="allow_execution: true"):
        CodeExecutionConfig()


def test_built_from_its_options():
    config = CodeExecutionConfig(allow_execution=True, tests_key="cases", cpu_seconds=1)
    reward = build(config, None)
    assert reward([rollout("print(2)", cases=[{"output": "2"}])]) == [1.0]


def test_the_last_fenced_block_is_the_program():
    assert program_in("a\n```python\nprint(1)\n```\nb\n```\nprint(2)\n```\n") == "print(2)\n"
    assert program_in("print(3)") == "print(3)"


def test_output_input_and_assertion_tests():
    assert score("print(6 * 7)", "42") == 1.0
    assert score("print(6 * 7)", "43") == 0.0
    echo = "print(input()[::-1])"
    assert score(echo, tests=[{"input": "abc", "output": "cba"}]) == 1.0
    two = [{"input": "abc", "output": "cba"}, {"input": "abc", "output": "abc"}]
    assert score(echo, tests=two) == 0.0
    assert score(echo, tests=two, partial_credit=True) == 0.5
    assert score("def add(a, b):\n    return a + b", tests="assert add(1, 2) == 3") == 1.0
    assert score("def add(a, b):\n    return a - b", tests=["assert add(1, 2) == 3"]) == 0.0


def test_ending_early_does_not_pass_the_assertions():
    assert score("import os\nos._exit(0)", tests="assert False") == 0.0


def test_without_tests_the_sample_is_named():
    with pytest.raises(ValueError, match="sample 7 has no tests"):
        score("print(1)")
    with pytest.raises(ValueError, match="sample 7: a test is"):
        score("print(1)", tests=[{"input": "1"}])


def test_wall_clock_limit():
    result = run_program("import time; time.sleep(600)", "", Limits(timeout_seconds=1.0))
    assert result.timed_out and not result.succeeded


def test_processor_limit():
    result = run_program("while True: pass", "", LIMITS)
    assert not result.timed_out and result.exit_code > 128


def test_memory_limit():
    assert run_program("bytearray(2 * 10**9); print('got it')", "", LIMITS).output == ""


def test_output_and_file_limits():
    limits = Limits(timeout_seconds=30.0, max_output_bytes=1000)
    result = run_program("print('x' * 100_000)", "", limits)
    assert result.output_too_long and not result.succeeded and len(result.output) == 1000
    flood = run_program("while True: print('x' * 10_000)", "", Limits(timeout_seconds=30.0, max_file_bytes=10**6))
    assert flood.exit_code != 0 and not flood.timed_out


def test_a_crash_is_a_failed_program():
    assert run_program("import ctypes; ctypes.string_at(0)", "", LIMITS).exit_code == 128 + 11


def test_nothing_of_the_environment_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    assert run_program("import os; print(os.environ.get('SECRET_TOKEN'))", "", LIMITS).output == "None\n"


def test_no_network():
    if not network_can_be_cut():
        pytest.skip("this system allows no network namespace")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nprint('connected')"
        result = run_program(program, "", LIMITS)
    assert result.network_off and "connected" not in result.output


def test_processes_left_behind_end_with_the_program():
    if not network_can_be_cut():
        pytest.skip("this system allows no namespaces")
    # The orphan leaves the process group, so only the end of its namespace ends it.
    seconds = f"86400.{os.getpid()}"
    program = (
        f"import os\nif os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['sleep', '{seconds}'])\nprint('done')"
    )
    result = run_program(program, "", LIMITS)
    assert result.succeeded and result.output == "done\n"
    assert seconds.encode() not in b"".join(command_lines())


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield path.read_bytes()


def test_an_open_network_is_refused_or_said(monkeypatch, caplog):
    monkeypatch.setattr(module, "network_can_be_cut", lambda: False)
    module._say_once_that_network_is_open.cache_clear()
    with pytest.raises(SandboxError, match="require_no_network"):
        code_execution([rollout("print(1)", "1")], allow_execution=True, require_no_network=True)
    assert score("print(1)", "1") == 1.0
    assert score("print(1)", "1") == 1.0
    assert sum("HAS network access" in record.message for record in caplog.records) == 1
