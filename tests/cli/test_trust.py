"""Which files of code a command runs: SECURITY.md."""

import json
import os
from pathlib import Path

import pytest
import yaml

from rlhf_cli.main import run as rlhf
from rlhf_core import train
from rlhf_core.config.load import load_run
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.run_record import _files_run
from rlhf_core.entry.seal import seal, sealed_files
from rlhf_core.errors import ConfigError
from rlhf_core.plugins.trust import FileTrust
from rlhf_core.testing.runs import tiny_run

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
    found = sorted(str(path.with_suffix(".py")) for path in Path().rglob("*.ran"))
    for path in Path().rglob("*.ran"):
        path.unlink()
    return found


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


def test_options_are_checked_from_the_source(place, capsys):
    write("theirs/run.yaml", "theirs/in/mine.py", tarqet=3)
    assert 'did you mean "target"' in says(capsys, "config", "check", "theirs/run.yaml", code=2)
    write("theirs/run.yaml", "theirs/in/mine.py")
    shown = yaml.safe_load(says(capsys, "config", "show", "theirs/run.yaml"))
    assert shown["rewards"][0]["target"] == 3
    assert resolve(shown, trust=FileTrust(runs=False)).to_mapping() == shown


def test_a_run_runs_files_below_its_file_or_named_or_trusted(place, capsys):
    says(capsys, "train", "theirs/run.yaml", "--dry-run")
    assert ran() == ["theirs/in/mine.py"]
    message = says(capsys, "train", "theirs/out.yaml", "--dry-run", code=2)
    assert "rewards.0.name" in message
    assert "--trust" in message
    assert ran() == []
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
    for folder, code in (("theirs/in", 0), ("other", 2)):
        Path(folder, "tool.py").write_text(TOOL)
        run = {**tiny_run({}), "environment": {"name": "tools", "functions": [f"{folder}/tool.py:double"]}}
        Path("theirs/run.yaml").write_text(yaml.safe_dump(run))
        says(capsys, "train", "theirs/run.yaml", "--dry-run", code=code)
        ran()
    says(capsys, "train", "theirs/run.yaml", "--dry-run", code=2)
    assert ran() == []
    says(capsys, "train", "theirs/run.yaml", "--dry-run", "--trust")
    resolved = resolve(load_run(run))
    assert _files_run(resolved) == {place / "other/tool.py"}


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
    (own / "manifest.json").write_text(json.dumps(seal(own, frozenset([file]))))
    assert sealed_files(own) == {file}
    key = place / "data" / "rlhf" / "run-folder-key"
    assert key.stat().st_mode & 0o777 == 0o600
    moved = own.rename(place / "moved")
    assert sealed_files(moved) == frozenset()
    moved.rename(own)
    said = json.loads((own / "manifest.json").read_text())
    said["trusted_files"]["files"].append(str(place / "x.py"))
    (own / "manifest.json").write_text(json.dumps(said))
    assert sealed_files(own) == frozenset()
    for broken in ('{"trusted_files": 3}', '{"trusted_files": {"files": [1], "seal": "x"}}'):
        (own / "manifest.json").write_text(broken)
        assert sealed_files(own) == frozenset()


def test_no_key_can_be_kept(place, monkeypatch):
    (place / "data").write_text("a file")
    assert seal(place, frozenset([place / "x.py"])) == {}
    assert not os.path.exists(place / "data" / "rlhf")


def test_a_run_says_what_it_ran_and_goes_on_with_it(place, capsys):
    train("theirs/out.yaml", output="run", trust=True)
    ran()
    says(capsys, "train", "--output", "run", "--resume", "auto", "--dry-run")
    assert ran() == ["other/mine.py"]
    key = place / "data" / "rlhf" / "run-folder-key"
    key.write_bytes(bytes(32))
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
