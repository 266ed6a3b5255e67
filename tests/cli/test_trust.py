"""Which files of code a command runs, and which programs it starts: SECURITY.md."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from rlhf_cli.main import run as rlhf
from rlhf_core import train
from rlhf_core.config.load import load_run
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.allowed_code import load_allowed_code, record_allowed_code
from rlhf_core.entry.run_record import _code_run
from rlhf_core.errors import ConfigError
from rlhf_core.plugins.trust import FileTrust
from rlhf_testing.runs import tiny_run

REWARD = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
def mine(rollouts, *, target: int = 3) -> list[float]:
    return [0.0] * len(rollouts)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working folder: `theirs/run.yaml` names `theirs/in/mine.py`, `theirs/out.yaml` the file `other/mine.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for folder in ("theirs/in", "other"):
        Path(folder).mkdir(parents=True)
        Path(folder, "mine.py").write_text(REWARD)
    write("theirs/run.yaml", "theirs/in/mine.py")
    write("theirs/out.yaml", "other/mine.py")
    return tmp_path


def write(path, file, **more):
    Path(path).write_text(yaml.safe_dump(tiny_run({"rewards": [{"name": f"{file}:mine", **more}]})))


def ran():
    """The files that were run, and forget it."""
    found = sorted(Path().rglob("*.ran"))
    for path in found:
        path.unlink()
    return [str(path.with_suffix(".py")) for path in found]


def says(capsys, *arguments, code=0):
    assert rlhf([str(each) for each in arguments]) == code, capsys.readouterr().err
    shown = capsys.readouterr()
    return shown.err if code else shown.out


@pytest.mark.parametrize("command", [["config", "check"], ["config", "show"], ["plan"]])
def test_looking_at_a_run_runs_no_file(place, capsys, command):
    for run_file in ("theirs/run.yaml", "theirs/out.yaml"):
        says(capsys, *command, run_file, "--reward", "other/mine.py:mine:0.5", "--set", "rewards.0.target=2")
        says(capsys, *command, run_file)
    assert ran() == []


def test_options_of_a_file_are_checked_where_it_is_run(place, capsys):
    write("theirs/run.yaml", "theirs/in/mine.py", tarqet=3)
    shown = yaml.safe_load(says(capsys, "config", "show", "theirs/run.yaml"))
    assert shown["rewards"][0]["tarqet"] == 3
    assert resolve(shown, trust=FileTrust(runs=False)).to_mapping() == shown
    assert 'did you mean "target"' in says(capsys, "train", "theirs/run.yaml", "--dry-run", code=2)


def test_a_run_runs_files_below_its_file_or_named_or_trusted(place, capsys):
    says(capsys, "train", "theirs/run.yaml", "--dry-run")
    assert ran() == ["theirs/in/mine.py"]
    message = says(capsys, "train", "theirs/out.yaml", "--dry-run", code=2)
    assert "rewards.0.name" in message and "--trust" in message and not ran()
    says(capsys, "train", "theirs/out.yaml", "--dry-run", "--trust")
    says(capsys, "train", "theirs/run.yaml", "--dry-run", "--reward", "./other/mine.py:mine:0.1")
    says(capsys, "train", "theirs/out.yaml", "--dry-run", "--set", "rewards.0.name=other/mine.py:mine")
    assert ran() == ["other/mine.py"]


TOOL = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
def double(number: int) -> int:
    \"\"\"Twice the number.\"\"\"
    return 2 * number
"""


def test_the_functions_of_tools_follow_the_same_rule(place, capsys):
    pytest.importorskip("rlhf_environments", reason="the environment tools is not installed")
    Path("theirs/chat").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for folder, code in (("theirs/in", 0), ("other", 2)):
        Path(folder, "tool.py").write_text(TOOL)
        environment = {"name": "tools", "functions": [f"{folder}/tool.py:double"]}
        run = tiny_run({"model": {"chat": {"template": "theirs/chat"}}, "environment": environment})
        Path("theirs/run.yaml").write_text(yaml.safe_dump(run))
        says(capsys, "train", "theirs/run.yaml", "--dry-run", code=code)
        ran()
    says(capsys, "train", "theirs/run.yaml", "--dry-run", code=2)
    assert not ran()
    says(capsys, "train", "theirs/run.yaml", "--dry-run", "--trust")
    resolved = resolve(load_run(run))
    assert _code_run(resolved) == {place / "other/tool.py"}


FUNCTIONS = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()

def centred(episode, *, scale: float = 1.0):
    return episode.mask * scale * (episode.totals - episode.totals.mean())[:, None]

def unclipped(batch, *, factor: float = 1.0):
    from rlhf_objective import PolicyLoss, importance_ratio
    ratio = importance_ratio(batch.log_probs, batch.old_log_probs, batch.mask)
    never = batch.mask & False
    return PolicyLoss(-factor * ratio * batch.advantages, ratio.detach(), never, never)

def squared(log_probs, reference_log_probs):
    return (log_probs - reference_log_probs) ** 2

def learn(context, *, speed: float = 1.0):
    from rlhf_group.critic_free import CriticFree
    from rlhf_group.config import RLOOConfig
    return CriticFree(RLOOConfig(kl_coef=0.0), context)

def letters(context, *, size: int = 20):
    return [{"prompt": "abcdefgh"[: 1 + n % 7], "answer": "a"} for n in range(size)]
"""
NAMED = {
    "advantage": lambda file: {"algorithm": {"name": "grpo", "advantage": {"name": f"{file}:centred", "scale": 2.0}}},
    "policy-loss": lambda file: {"algorithm": {"name": "ppo", "policy_loss": f"{file}:unclipped"}},
    "kl": lambda file: {"algorithm": {"name": "ppo", "kl_estimator": f"{file}:squared"}},
    "algorithm": lambda file: {"algorithm": {"name": f"{file}:learn", "speed": 2.0}},
    "prompts": lambda file: {"prompts": {"name": f"{file}:letters", "size": 30}},
}


@pytest.fixture(params=NAMED)
def names(place, request):
    """Writes the run file that names a function of a file, in each place where a plugin's name stands."""
    for folder in ("theirs/in", "other"):
        Path(folder, "mine.py").write_text(FUNCTIONS)

    def write(file):
        run = tiny_run({"train": {"samples_per_prompt": 2, "episodes": 1}, **NAMED[request.param](file)})
        if request.param == "prompts":
            run["prompts"] = NAMED["prompts"](file)["prompts"]
        Path("theirs/run.yaml").write_text(yaml.safe_dump(run))

    return write


def test_functions_in_place_of_plugins_follow_the_same_rule(names, capsys):
    names("theirs/in/mine.py")
    says(capsys, "train", "theirs/run.yaml", "--dry-run")
    assert ran() == ["theirs/in/mine.py"]
    names("other/mine.py")
    for command in ("check", "show"):
        says(capsys, "config", command, "theirs/run.yaml")
    assert "--trust" in says(capsys, "train", "theirs/run.yaml", "--dry-run", code=2) and not ran()
    says(capsys, "train", "theirs/run.yaml", "--dry-run", "--trust")
    assert ran() == ["other/mine.py"]


def test_functions_in_place_of_plugins_train(names, capsys):
    names("theirs/in/mine.py")
    says(capsys, "train", "theirs/run.yaml", "--output", "run", "--quiet")
    assert json.loads(Path("run/summary.json").read_text())["status"] == "done"
    written = yaml.safe_load(Path("run/config.yaml").read_text())
    assert str(Path("theirs/in/mine.py").absolute()) in json.dumps(written)
    again = resolve(written, trust=FileTrust(runs=False)).to_mapping()
    assert again == written


def test_a_plan_runs_none_of_them(names, capsys):
    names("theirs/in/mine.py")
    assert "does not run code from files" in says(capsys, "plan", "theirs/run.yaml", code=2)
    assert ran() == []


def test_options_of_these_functions_are_checked_where_they_are_run(place, capsys):
    Path("theirs/in/mine.py").write_text(FUNCTIONS)
    loss = {"name": "theirs/in/mine.py:unclipped", "factr": 1.0}
    for algorithm, said in (
        ({"name": "ppo", "policy_loss": loss}, 'did you mean "factor"'),
        ({"name": "theirs/in/mine.py:learn", "sped": 1.0}, 'did you mean "speed"'),
        ({"name": "ppo", "kl_estimator": "theirs/in/mine.py:sqared"}, 'did you mean "squared"'),
        ({"name": "ppo", "kl_estimator": "k33"}, 'did you mean "k3"'),
    ):
        Path("theirs/run.yaml").write_text(yaml.safe_dump(tiny_run({"algorithm": algorithm})))
        assert said in says(capsys, "train", "theirs/run.yaml", "--dry-run", code=2)


STARTS = """
import subprocess
from rlhf_core.components import Component
from rlhf_core.config import Command, Section
class Options(Section):
    command: Command
    others: dict[str, Command] = {}
class Starts:
    def __init__(self, command):
        subprocess.run(command, check=False)
    def reset(self, task): return ">"
    def step(self, reply): return None, 0.0, True
def build(config, context):
    return Starts(config.command)
starts = Component(summary="Starts a program.", config=Options, build="starts_a_program:build")
"""


@pytest.fixture
def starts(place, monkeypatch):
    """The environment `starts`, whose `command` is started by an episode, and programs that say that they ran."""
    site = place / "site"
    site.mkdir()
    (site / "starts_a_program.py").write_text(STARTS)
    info = site / "starts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: starts\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rlhf.environments]\nstarts = starts_a_program:starts\n")
    monkeypatch.syspath_prepend(str(site))
    for folder in ("theirs", "other"):
        program = Path(folder, "serve")
        program.write_text('#!/bin/sh\n: >"$0.ran"\n')
        program.chmod(0o700)
    yield
    sys.modules.pop("starts_a_program", None)


def with_command(command, **more):
    run = tiny_run({"environment": {"name": "starts", "command": command, **more}, "rewards": []})
    Path("theirs/run.yaml").write_text(yaml.safe_dump(run))


@pytest.mark.usefixtures("starts")
def test_a_program_is_started_where_a_file_would_be_run(place, capsys, monkeypatch):
    with_command(["theirs/serve", "--any", "/etc/passwd"])
    says(capsys, "train", "theirs/run.yaml", "--dry-run")
    assert ran() == ["theirs/serve.py"]
    Path("theirs/link").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(place / "theirs"), prepend=os.pathsep)
    outside = (["other/serve"], ["serve"], ["sh", "-c", "exit"], ["python", "theirs/serve"], ["theirs/link", "-c", ":"])
    for command in (*outside, ["theirs/../other/serve"], [str(place / "other/serve")]):
        with_command(command)
        message = says(capsys, "train", "theirs/run.yaml", "--dry-run", code=2)
        assert "environment.command" in message and "--trust" in message and not ran(), message
        says(capsys, "train", "theirs/run.yaml", "--dry-run", "--trust")
        ran()
    with_command(["theirs/serve"], others={"second": ["other/serve"]})
    assert "environment.others.second" in says(capsys, "train", "theirs/run.yaml", "--dry-run", code=2)
    assert ran() == []


@pytest.mark.usefixtures("starts")
def test_a_program_that_the_command_line_gives_needs_trust_too(place, capsys):
    with_command(["other/serve", "theirs"])
    given = ("train", "theirs/run.yaml", "--dry-run", "--set", "environment.command=[other/serve, mine]")
    assert "--trust" in says(capsys, *given, code=2)
    says(capsys, *given, "--trust")
    assert ran() == ["other/serve.py"]
    train(yaml.safe_load(Path("theirs/run.yaml").read_text()), dry_run=True)  # the caller's own mapping
    assert ran() == ["other/serve.py"]


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("command", [["config", "check"], ["config", "show"], ["plan"]])
def test_looking_at_a_run_starts_no_program(place, capsys, command):
    for program in ("theirs/serve", "other/serve"):
        with_command([program])
        says(capsys, *command, "theirs/run.yaml")
    assert ran() == []


@pytest.mark.usefixtures("starts")
def test_a_resume_asks_again_for_a_program(place, capsys):
    with_command(["other/serve"])
    train("theirs/run.yaml", output="run", trust=True)
    assert ran() == ["other/serve.py"]
    again = ("train", "--output", place / "run", "--resume", "auto", "--dry-run")
    assert "environment.command" in says(capsys, *again, code=2)
    assert ran() == []
    says(capsys, *again, "--trust")


def test_a_link_out_of_the_folder_does_not_count_as_in_it(place, capsys):
    Path("theirs/link.py").symlink_to(place / "other" / "mine.py")
    Path("theirs/linked").symlink_to(place / "other")
    for file in ("theirs/link.py", "theirs/linked/mine.py", "theirs/../other/mine.py"):
        write("theirs/run.yaml", file)
        says(capsys, "train", "theirs/run.yaml", "--dry-run", code=2)
    assert not [each for each in ran() if "other" in each]


def run_folder(path, file):
    """What a run leaves of itself, as far as it is believed."""
    path.mkdir()
    run = tiny_run({"rewards": [{"name": f"{file.absolute()}:mine"}]})
    (path / "config.yaml").write_text(yaml.safe_dump(resolve(load_run(run)).to_mapping()))
    (path / "manifest.json").write_text("{}")
    ran()
    return path


def test_the_folder_of_another_run_is_not_believed(place, capsys):
    origin = run_folder(place / "first", Path("other/mine.py"))
    (origin / "mine.py").write_text(REWARD)
    says(capsys, "train", "--from", "first", "--output", "new", "--dry-run", code=2)
    assert ran() == []
    says(capsys, "train", "--from", "first", "--output", "new", "--dry-run", "--trust")
    says(capsys, "train", "--from", "first", "--output", "new", "--dry-run", "--reward", "other/mine.py:mine")
    assert ran() == ["other/mine.py"]


def test_a_resume_runs_what_its_own_run_was_allowed_to(place):
    file = Path("other/mine.py").absolute()
    own = run_folder(place / "own", file)
    record_allowed_code(own, [file])
    assert load_allowed_code(own) == {file}
    moved = own.rename(place / "moved")
    assert load_allowed_code(moved) == frozenset()
    own.mkdir()  # by someone else
    assert load_allowed_code(own) == frozenset()
    own.rmdir()
    assert load_allowed_code(moved.rename(own)) == {file}
    record_allowed_code(own, [])
    assert load_allowed_code(own) == frozenset()


def test_no_note_can_be_kept(place):
    (place / "data").write_text("a file")
    record_allowed_code(place, [place / "x.py"])
    assert load_allowed_code(place) == frozenset()


@pytest.mark.parametrize("content", ["", "{", "{}", "[]"])
def test_a_note_that_is_none_allows_nothing(place, content):
    record_allowed_code(place, [place / "x.py"])
    (note,) = (place / "data" / "rlhf" / "allowed-code").iterdir()
    note.write_text(content)
    assert load_allowed_code(place) == frozenset()


def test_a_run_goes_on_with_what_it_ran(place, capsys):
    train("theirs/out.yaml", output="run", trust=True)
    ran()
    says(capsys, "train", "--output", "run", "--resume", "auto", "--dry-run")
    assert ran() == ["other/mine.py"]
    for note in (place / "data" / "rlhf" / "allowed-code").iterdir():
        note.unlink()
    assert "--trust" in says(capsys, "train", "--output", "run", "--resume", "auto", "--dry-run", code=2)


def test_python_follows_the_same_rule(place):
    with pytest.raises(ConfigError, match="--trust"):
        train("theirs/out.yaml", dry_run=True)
    train("theirs/run.yaml", dry_run=True)
    train(load_run("theirs/out.yaml"), dry_run=True)  # the caller's own mapping
    assert ran() == ["other/mine.py", "theirs/in/mine.py"]


def test_code_of_a_model_is_code(place):
    run = tiny_run({"model": {"path": "theirs/model", "trust_remote_code": True}, "rewards": ["exact-match"]})
    Path("theirs/model").mkdir()
    for trust in (FileTrust(), FileTrust(folder=place / "other"), FileTrust(files=frozenset([place / "theirs"]))):
        with pytest.raises(ConfigError, match="--trust"):
            resolve(run, trust=trust)
    resolve(run, trust=FileTrust(folder=place / "theirs"))
    resolve(run, trust=FileTrust(files=frozenset([place / "theirs" / "model"])))
    run["model"]["path"] = "hub/model"  # a hub model lies in no folder
    with pytest.raises(ConfigError, match="--trust"):
        resolve(run, trust=FileTrust(folder=place))


def test_a_plan_runs_no_code_of_a_model(place, capsys):
    path = place / "theirs" / "model.yaml"
    path.write_text(yaml.safe_dump(tiny_run({"model": {"trust_remote_code": True}})))
    assert "model.trust_remote_code" in says(capsys, "plan", path, code=2)
