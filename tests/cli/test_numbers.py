"""Numbers are printed as people read them."""

import pytest

from rlhf_cli.main import run
from rlhf_cli.numbers import readable


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (-6.27e-09, "kl/mean", "0.000"),
        (0.00042, "kl/mean", "0.0004"),
        (-0.4484, "loss/policy", "-0.448"),
        (200.0, "eval/num_prompts", "200"),
        (12345.0, "num_scored", "12,345"),
        (3, "", "3"),
        (1e-6, "policy/lr", "1e-06"),
        (4321.5, "reward/mean", "4,322"),
        (None, "eval/score", "-"),
        (float("nan"), "loss/value", "nan"),
    ],
)
def test_readable(value, name, text):
    assert readable(value, name) == text


@pytest.mark.parametrize(("shell", "says"), [("bash", "complete -o nosort"), ("zsh", "compdef"), ("fish", "function")])
def test_completion_prints_what_a_shell_sources(shell, says, monkeypatch, capsys):
    monkeypatch.setenv("_RLHF_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit):
        run([])
    assert says in capsys.readouterr().out


def test_completion_knows_commands_and_flags(monkeypatch, capsys):
    monkeypatch.setenv("_RLHF_COMPLETE", "bash_complete")
    for words, found in (("rlhf exp", "export"), ("rlhf train --strat", "--strategy")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            run([])
        assert found in capsys.readouterr().out
