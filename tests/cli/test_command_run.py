"""A command of a plugin that is about a run: its parameter `run`."""

import json
import re
from pathlib import Path

import pytest

from rlhf_cli.main import run as rlhf
from rlhf_testing.runs import tiny_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kinds" / "commands.md"
OWN = """
import click

@click.command("own")
@click.argument("run")
def own(run):
    click.echo(f"own {run}")
"""


@pytest.fixture
def commands(install, tmp_path, monkeypatch):
    """The command of the page, and one whose parameter `run` is filled by its own argument."""
    (example,) = re.findall(r"```python\n(# acme_count\.py\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    points = {"count": "acme_count:count", "own": "acme_own:own"}
    install("acme", {"rlhf.commands": points}, {"acme_count": example, "acme_own": OWN})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(tiny_run()))
    (tmp_path / "mine.py").touch()


def test_the_command_of_the_page(commands, capsys):
    assert rlhf(["count", "run.yaml", "--set", "train.episodes=3"]) == 0
    assert capsys.readouterr().out.startswith("24 samples, ")


def test_its_help_shows_the_flags_of_a_run_before_its_own(commands, capsys):
    assert rlhf(["count", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "[RUN.yaml]" in shown and shown.index("--set") < shown.index("--num-processes")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "algorithm.kl_cof=1"], "kl_coef"),
        (["--num-processes", "2"], "--num-processes 2: strategy single supports one process"),
        (["--set", "prompts.filter=./mine.py:easy"], "prompts: rlhf count does not run code from files"),
    ],
)
def test_a_wrong_run_is_an_error_of_the_user(commands, capsys, flags, message):
    assert rlhf(["count", "run.yaml", *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_own_argument_named_run_stays(commands, capsys):
    assert rlhf(["own", "runs/first"]) == 0
    assert capsys.readouterr().out == "own runs/first\n"
