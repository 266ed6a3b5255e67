"""Tools from files, and the Python tool in the sandbox."""

import pytest
from pydantic import ValidationError

from rlhf_containment.sandbox import missing
from rlhf_core.components import TaskContext
from rlhf_core.config.problems import Problems
from rlhf_core.errors import ConfigError, PluginError
from rlhf_environments import python_tool as module
from rlhf_environments.config import ToolsConfig
from rlhf_environments.tools import Tools
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.episodes import episode_tokenizer, play_episodes

in_the_sandbox = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")

FILE = '''
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b
'''


def tools(folder, **options):
    return Tools(ToolsConfig(**options), TaskContext(seed=0, base_folder=folder)).tools


def python(**options):
    return tools(None, functions=["python"], allow_execution=True, python_timeout_seconds=20.0, **options)["python"]


def test_functions_of_a_file_are_found_from_the_runs_folder(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    found = tools(tmp_path, functions=["./mine.py:add"])
    assert list(found) == ["add"]
    assert found["add"](a=2, b=3) == 5
    assert tools(tmp_path, functions=["./mine.py:add"])["add"] is found["add"], "the file is run once"


def test_a_function_that_is_not_there_is_told(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(PluginError, match=r'mine.py does not define a function "ad"; did you mean "add"'):
        tools(tmp_path, functions=["mine.py:ad"])
    with pytest.raises(PluginError, match="no such file"):
        tools(tmp_path, functions=["other.py:add"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "functions"),
        ({"functions": []}, "functions"),
        ({"functions": ["calculator"]}, "neither FILE.py:FUNCTION nor python"),
        ({"functions": ["a.py:add", "b.py:add"]}, "two tools are named 'add'"),
        ({"functions": ["python"]}, "set allow_execution: true"),
        ({"functions": ["a.py:add"], "python_sandbox": "none"}, "python_sandbox"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        ToolsConfig(**options)


@in_the_sandbox
def test_python_gives_back_what_a_program_prints(tmp_path):
    run = python()
    assert run("print(6 * 7)") == "42"
    assert run("x = 1") == "[it printed nothing]"
    failed = run("print(1)\nprint(undefined)")
    assert failed.startswith("1\n\n[exit code 1]") and "NameError" in failed
    intruder = tmp_path / "intruder"
    assert "[exit code 1]" in run(f"open({str(intruder)!r}, 'w')")
    assert not intruder.exists()


@in_the_sandbox
def test_the_policy_runs_python_in_an_episode():
    """In the sandbox, from the process of its own that tools have."""
    problems = Problems()
    environment = resolve_environment({"name": "tools", "functions": ["python"], "allow_execution": True}, problems)
    problems.raise_if_any("environment")
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
    records = [{"prompt": "6 * 7?", "answer": "42"}]
    done = play_episodes(environment, episode_tokenizer(chat=True), records=records, replies=[call], num_prompts=2)
    said = [turn.text for each in done.played for turn in each.rows[0].turns if turn.role == "environment"]
    assert environment.config.isolate and "42" in said


@in_the_sandbox
@pytest.mark.slow
def test_python_tells_which_limit_ended_a_program():
    assert python(python_cpu_seconds=1)("while True: pass") == "[ended: it took too much processor time]"
    told = python(max_output_chars=20)("print('a' * 100 + 'b')")
    assert told == "aaaaaaaaaa\n[81 characters left out]\naaaaaaaaab"


def test_a_machine_without_the_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(module, "missing", lambda mode: f"it lacks: {mode}")
    with pytest.raises(ConfigError, match="it lacks: namespaces") as raised:
        python()
    assert "python_sandbox: landlock" in str(raised.value.hint)
