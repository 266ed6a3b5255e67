"""What a model or somebody else's code wrote does not drive the terminal: no command prints control characters."""

import json
import logging

import click
import pytest

from rlhf_cli import answers, main
from rlhf_cli.commands.train import log_to_stderr
from rlhf_cli.main import run
from rlhf_cli.output import echo, print_json, print_table
from rlhf_cli.progress import RunProgress
from rlhf_core.errors import RewardError
from rlhf_core.runfolder import RunFolder
from rlhf_core.util.redact import printable

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\r\x9b31mc\x7fd\u202ee\ud800"
SHOWN = r"a\x1b[2J\x1b]0;title\x07b\r\x9b31mc\x7fd\u202ee\ud800"


def test_control_characters_are_written_out_and_text_stays():
    assert printable(HOSTILE) == SHOWN
    ordinary = "déjà vu\t日本語\u3000x\n\N{NO-BREAK SPACE}\N{FAMILY}\u200d\N{FAMILY}"
    assert printable(ordinary) == ordinary


def failing(error):
    @click.command()
    def command():
        raise error

    return command


@pytest.mark.parametrize("error", [RewardError(HOSTILE), ValueError(HOSTILE), click.UsageError(HOSTILE)])
def test_errors(error, monkeypatch, capsys):
    monkeypatch.setattr(main, "cli", failing(error))
    assert run([]) != 0
    said = capsys.readouterr().err
    assert r"\x07b\r\x9b31mc\x7fd\u202ee\ud800" in said  # click itself takes out the colours of its errors
    assert printable(said) == said


def test_answers(monkeypatch, capsys):
    monkeypatch.setattr(answers, "generate_answers", lambda *arguments, **options: [{"completion": HOSTILE}])
    assert run(["generate", "--model", "m", "--prompt", "p"]) == 0
    assert capsys.readouterr().out == SHOWN + "\n"
    assert run(["generate", "--model", "m", "--prompt", "p", "--json"]) == 0
    said = capsys.readouterr().out
    assert said.isascii() and "\x1b" not in said and "\x7f" not in said
    assert json.loads(said) == [{"prompt": "p", "completion": HOSTILE}]


def test_every_way_out(capsys, tmp_path):
    echo(HOSTILE)
    print_table(["name"], [[HOSTILE]])
    RunProgress().print_line(HOSTILE)
    print_json({HOSTILE: "日本"})
    said = capsys.readouterr().out
    assert said.count(SHOWN) == 3 and "日本" in said and "\x1b" not in said and "\x9b" not in said


def test_logs(capsys, tmp_path, monkeypatch):
    logger = logging.getLogger("rlhf")
    monkeypatch.setattr(logger, "propagate", False)  # pytest would keep the text, and cannot send it between processes
    before = logger.handlers
    folder = RunFolder(tmp_path)
    try:
        log_to_stderr("normal")
        with folder.logging():
            logger.warning("it said %s", HOSTILE)
    finally:
        logger.handlers = before
    assert SHOWN in capsys.readouterr().err
    assert SHOWN in folder.log.read_text()
