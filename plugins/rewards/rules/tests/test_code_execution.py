"""Model-written programs in the sandbox: what passes, and what each limit does."""

from types import SimpleNamespace

import pytest

from rlhf_containment.sandbox import Limits, missing
from rlhf_core.errors import ConfigError
from rlhf_reward_rules import code_execution as module
from rlhf_reward_rules.code_execution import build, code_execution, program_in
from rlhf_reward_rules.config import CodeExecutionConfig

LIMITS = Limits(timeout_seconds=30.0, cpu_seconds=1)
in_the_sandbox = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")


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


@in_the_sandbox
def test_built_from_its_options():
    config = CodeExecutionConfig(allow_execution=True, tests_key="cases", cpu_seconds=1)
    reward = build(config, None)
    assert reward([rollout("print(2)", cases=[{"output": "2"}])]) == [1.0]


def test_the_last_fenced_block_is_the_program():
    assert program_in("a\n```python\nprint(1)\n```\nb\n```\nprint(2)\n```\n") == "print(2)\n"
    assert program_in("print(3)") == "print(3)"


@in_the_sandbox
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


@in_the_sandbox
def test_ending_early_does_not_pass_the_assertions():
    assert score("import os\nos._exit(0)", tests="assert False") == 0.0


@in_the_sandbox
def test_the_file_of_the_program_does_not_hold_what_passes_the_assertions():
    """It printed the last line of its file, with the token."""
    cheat = "import os, sys\nfor each in (__file__, '/input'):\n    print(open(each).read())\n"
    found = (
        "print(*__import__('re').findall('[0-9a-f]{32}', open(__file__).read()), sep='\\n', flush=True)\nos._exit(0)"
    )
    assert score(cheat + found, tests="assert False") == 0.0
    assert score("import os\n" + found, tests="assert False") == 0.0


@in_the_sandbox
def test_programs_with_assertions_run_as_a_script_does():
    program = """\
from __future__ import annotations
import inspect, multiprocessing, sys

def print(*given):
    raise RuntimeError("the program's own")

def double(x: Undefined):
    return 2 * x

assert inspect.getsource(double).startswith("def double")
assert sys.modules["__main__"].double is double and not hasattr(sys.modules["__main__"], "_run")
if __name__ == "__main__":
    ran = True
"""
    assert score(program, tests="assert ran and double(2) == 4") == 1.0
    assert score("def broken(:", tests="pass") == 0.0


def test_without_tests_the_sample_is_named():
    with pytest.raises(ValueError, match="sample 7 needs tests"):
        score("print(1)")
    with pytest.raises(ValueError, match="sample 7: a test is"):
        score("print(1)", tests=[{"input": "1"}])


@in_the_sandbox
def test_hostile_programs_score_nothing_and_leave_nothing(tmp_path):
    written = tmp_path / "intruder"
    assert score(f"open({str(written)!r}, 'w').write('x')\nprint(1)", "1") == 0.0
    assert score("while True: print('x' * 10_000)", "1") == 0.0
    assert score("import os\nfor _ in range(1000): os.mkdir('d'); os.chdir('d')\nprint(1)", "1") == 1.0
    assert not written.exists()


def test_a_machine_without_the_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(module, "missing", lambda mode="namespaces": f"it lacks: {mode}")
    with pytest.raises(ConfigError, match="it lacks: namespaces"):
        build(CodeExecutionConfig(allow_execution=True), None)


def test_the_weaker_mode_is_named_where_it_would_do_and_said_where_it_is_used(monkeypatch, caplog):
    monkeypatch.setattr(module, "missing", {"namespaces": "it lacks: user namespaces", "landlock": None}.get)
    with pytest.raises(ConfigError, match="sandbox: landlock"):
        build(CodeExecutionConfig(allow_execution=True), None)
    build(CodeExecutionConfig(allow_execution=True, sandbox="landlock"), None)
    assert "weaker sandbox `landlock`" in caplog.text
