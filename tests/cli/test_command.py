"""The command: what it hands on, what it prints, and how it ends."""

import errno
import json
import logging
import re
import sys
import types
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner

from rlhf_cli import main as main_module
from rlhf_cli.commands.train import print_prompt
from rlhf_cli.commands.train import train as train_command
from rlhf_cli.main import COMMANDS, cli, run
from rlhf_cli.progress import quiet_progress
from rlhf_core.errors import InterruptedRun, RewardError
from rlhf_core.plugins import discovery

pytestmark = pytest.mark.usefixtures("fake_plugins")


def provide(monkeypatch, module, **attributes):
    """Stand in for a module that a command imports when it runs."""
    fake = types.ModuleType(module)
    for name, value in attributes.items():
        setattr(fake, name, value)
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.fixture
def run_file(tmp_path: Path, fake_run) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(fake_run))
    return str(path)


@pytest.fixture
def calls(monkeypatch):
    made = []

    def record(kind):
        def start(*args, **options):
            made.append((kind, args, options))
            if options["dry_run"]:
                return None
            return SimpleNamespace(run_folder="runs/x", summary={"eval_after": 0.75}, metrics=[])

        return start

    provide(monkeypatch, "rlhf_core.entry.train", train=record("train"))
    provide(monkeypatch, "rlhf_start.stages", run_quickstart=record("quickstart"))
    return made


def test_train_hands_over_file_flags_and_set_in_this_order(run_file, calls, capsys, tmp_path):
    code = run(
        ["train", run_file, "--engine", "fake-engine-2", "--model", "m", "--reward", "fake-whisper:2",
         "--set", "rewards.0.weight=3", "--set", "engine.top_k=5", "--set", "model.dtype=float32",
         "--num-processes", "2", "--output", str(tmp_path / "o"), "--resume", "auto", "--dry-run", "--verbose"]
    )  # fmt: skip
    assert code == 0
    ((kind, (mapping,), options),) = calls
    assert kind == "train"
    assert mapping["model"] == {"path": "m", "dtype": "float32"}
    assert mapping["engine"] == {"name": "fake-engine-2", "max_new_tokens": 5, "top_k": 5}
    assert mapping["rewards"] == [{"name": "fake-whisper", "weight": 3}]
    assert options.pop("hooks") == ["rlhf_cli.progress:RunProgress"]
    assert options.pop("trust").folder == tmp_path
    assert options.pop("on_check") is print_prompt
    assert options == {
        "output": tmp_path / "o", "resume": "auto", "restart": False, "num_processes": 2, "dry_run": True,
    }  # fmt: skip
    assert "can run; nothing was written" in capsys.readouterr().out


def test_quiet_shows_only_the_end(run_file, calls, capsys):
    assert run(["train", run_file, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    (hook,) = calls[0][2]["hooks"]
    assert hook == "rlhf_cli.progress:quiet_progress"
    assert resolve_name(hook) is quiet_progress


@pytest.mark.parametrize(("flags", "shown"), [([], "WARN"), (["--quiet"], ""), (["--verbose"], "DEBUG WARN")])
def test_verbosity_decides_what_of_the_log_is_shown(run_file, monkeypatch, capsys, flags, shown):
    def talk(*args, **options):
        logging.getLogger("rlhf.part").debug("DEBUG")
        logging.getLogger("rlhf.part").warning("WARN")

    provide(monkeypatch, "rlhf_core.entry.train", train=talk)
    logger = logging.getLogger("rlhf")
    before = (logger.level, list(logger.handlers))
    try:
        assert run(["train", run_file, *flags]) == 0
    finally:
        logger.setLevel(before[0])
        logger.handlers = before[1]
    said = capsys.readouterr().err
    assert [word for word in ("DEBUG: DEBUG", "WARNING: WARN") if word in said] == [
        word for word in ("DEBUG: DEBUG", "WARNING: WARN") if word.split()[1] in shown.split()
    ]


def test_a_flag_that_switches_a_plugin_says_what_it_drops(run_file, calls, capsys):
    assert run(["train", run_file, "--algorithm", "fake-relearn", "--set", "algorithm.gamma=0.5"]) == 0
    assert calls[0][1][0]["algorithm"] == {"name": "fake-relearn", "gamma": 0.5}
    assert "note: dropped algorithm.clip_eps" in capsys.readouterr().err


def test_without_a_run_file_the_quickstart_runs(calls):
    assert run(["train", "--transport", "fake-near", "--set", "train.episodes=3"]) == 0
    ((kind, (warm_start, mapping), _),) = calls
    assert kind == "quickstart"
    assert warm_start["algorithm"]["name"] == "sft"
    assert warm_start["train"]["episodes"] != 3, "flags are for the second stage only"
    assert mapping["algorithm"]["name"] == "ppo"
    assert mapping["train"]["episodes"] == 3
    assert mapping["transport"] == {"name": "fake-near"}


def test_the_quickstart_first_says_how_long_it_takes(calls, capsys, run_file):
    assert run(["train"]) == 0
    assert re.match(r"the quickstart takes about [1-5] minutes on two CPU cores\n", capsys.readouterr().out)
    for others in (["--quiet"], ["--dry-run"], ["--num-processes", "2"], ["--transport", "fake-near"], [run_file]):
        assert run(["train", *others]) == 0
        assert "takes about" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["train"], ["train", "--environment", "guess-number"], ["config", "show"]])
def test_without_a_run_file_and_a_quickstart_it_says_what_to_install(monkeypatch, capsys, arguments):
    found = discovery.discover
    monkeypatch.setattr(discovery, "discover", lambda kind: {} if kind == "quickstarts" else found(kind))
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert "no run file specified" in err and "pip install rlhf-start" in err


def test_a_model_of_ones_own_needs_no_warm_start(calls):
    assert run(["train", "--model", "my-model"]) == 0
    assert calls[0][0] == "train"
    assert calls[0][1][0]["model"]["path"] == "my-model"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RewardError("got nan", where="brevity", hint="mend it"), 1, "error: brevity: got nan\n  -> mend it\n"),
        (InterruptedRun("stopped at step 3"), 130, "stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_for_the_reader_have_no_traceback(run_file, monkeypatch, capsys, error, code, text):
    def fail(*args, **options):
        raise error

    provide(monkeypatch, "rlhf_core.entry.train", train=fail)
    assert run(["train", run_file]) == code
    assert capsys.readouterr().err.lstrip("\n") == text


def test_errors_of_a_run_name_its_source(run_file, capsys):
    assert run(["train", run_file, "--set", "train.sead=1"]) == 2
    assert 'error: --set train.sead: unknown key; did you mean "seed"?' in capsys.readouterr().err
    with open(run_file, "a", encoding="utf-8") as file:
        file.write("\ntrian: {seed: 1}\n")
    assert run(["train", run_file]) == 2
    assert f'error: {run_file}: trian: unknown key; did you mean "train"?' in capsys.readouterr().err


def test_a_full_disk_is_a_message(run_file, monkeypatch, capsys):
    def start(run, **options):
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "runs/x/summary.json")
        except OSError as error:  # a hook's, beside the run's own
            logging.getLogger("rlhf").error("the report cannot be written", exc_info=error)
            raise

    provide(monkeypatch, "rlhf_core.entry.train", train=start)
    assert run(["train", str(run_file)]) == 1
    said = capsys.readouterr().err
    assert "error: runs/x/summary.json: the disk is full\n  -> " in said
    assert "ERROR: the report cannot be written\n" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("log", [None, "runs/x/run.log"])
def test_a_bug_keeps_its_traceback(run_file, monkeypatch, capsys, log):
    def fail(*args, **options):
        error = ZeroDivisionError("oh")
        if log is not None:
            error.run_log = log
        raise error

    provide(monkeypatch, "rlhf_core.entry.train", train=fail)
    assert run(["train", run_file]) == 1
    said = capsys.readouterr().err
    assert "error: ZeroDivisionError: oh" in said
    assert ("Traceback" in said) == (log is None)
    assert ("the traceback is in runs/x/run.log" in said) == (log is not None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'; did you mean \"train\"?"),
        (["train", "--num-processes", "0"], "0 is not in the range x>=1"),
        (["train", "none.yaml"], "cannot read the run file"),
        (["train", "--set", "nonsense"], '"nonsense" is not key.path=value'),
        (["train", "--algorithm", "fake-lern"], 'no algorithm "fake-lern" is installed'),
        (["train", "--reward", "fake-shout:x"], '"x" is not a weight'),
        (["plugins", "show", "fake-larn"], 'no plugin "fake-larn" is installed; did you mean'),
        (["plugins", "show", "algorithm/fake-lern"], 'did you mean "fake-learn"?'),
        (["plugins", "check", "fake-lern"], 'no plugin "fake-lern" is installed; did you mean "fake-learn"?'),
        (["config", "check", "none.yaml"], "cannot read the run file"),
        (["generate", "--prompt", "x"], "Missing option '--model'"),
        (["eval", "--model", "m", "--prompts", "none.jsonl"], "does not exist"),
        (["report", "none"], "does not exist"),
    ],
)
def test_wrong_input_is_exit_2_and_readable(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_config_check_and_show(run_file, capsys):
    assert run(["config", "check", run_file]) == 0
    assert "algorithm fake-learn, strategy fake-place" in capsys.readouterr().out
    assert run(["config", "show", run_file, "--set", "train.seed=7"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["train"]["seed"] == 7
    assert shown["algorithm"] == {"name": "fake-learn", "clip_eps": 0.3, "gamma": 1.0}
    assert run(["config", "check", run_file, "--set", "train.sead=7", "--set", "model.lora.r=0"]) == 2
    assert f"{run_file}: 2 problems" in capsys.readouterr().err


def test_what_config_show_prints_is_a_run_file(run_file, capsys, tmp_path):
    assert run(["config", "show", run_file]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "full.yaml").write_text(shown)
    assert run(["config", "show", str(tmp_path / "full.yaml")]) == 0
    assert capsys.readouterr().out == shown


def test_config_schema_is_json(capsys):
    assert run(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "rlhf run file"


def test_plugins_list_is_whole_lines_or_json(install, capsys):
    long_name = "a-very-long-plugin-name-" * 8 + "end"
    install("acme", {"rlhf.rewards": {long_name: "acme_absent:thing"}})
    install("bolt", {"rlhf.rewards": {long_name.upper(): "bolt_absent:thing"}})
    assert run(["plugins", "list"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if long_name in line.lower()]
    assert len(lines) == 2
    assert all(line.endswith("CLASH: provided twice") for line in lines)
    assert run(["plugins", "list", "--json"]) == 0
    rows = {(row["kind"], row["name"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["rewards", long_name]["clash"] is True
    assert rows["algorithms", "fake-learn"] == {
        "kind": "algorithms", "name": "fake-learn", "distribution": "fake-plugins", "version": "1.2.3",
        "target": "fake_plugins_module:learn", "missing": [], "clash": False,
    }  # fmt: skip


def test_plugins_list_says_what_a_plugin_needs(install, capsys):
    install("acme", {"rlhf.engines": {"thing": "acme_absent:thing [no_such_module]"}})
    assert run(["plugins", "list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "acme_absent" in line]
    assert line.endswith("needs no_such_module: see rlhf plugins show engines/thing")


def test_plugins_show_tells_options_with_bounds(capsys):
    assert run(["plugins", "show", "algorithm/Fake_Learn"]) == 0
    shown = capsys.readouterr().out
    assert "algorithms/fake-learn (fake-plugins 1.2.3): Learns." in shown
    assert "clip_eps  number > 0" in shown
    assert run(["plugins", "show", "strategies/fake-place", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["properties"]["precision"]["enum"] == ["auto", "fp32"]


@pytest.mark.slow
def test_plugins_check_tells_ok_missing_and_broken(install, capsys):
    source = """
        from pydantic import BaseModel
        from rlhf_core.components import Component
        from rlhf_core.config.sections import EngineConfig
        needy = Component("Needs.", EngineConfig, "a:b", requires=("no_such_module_xyz",), install="pip install xyz")

        def rlhf_episode_end(error):
            pass
    """
    targets = {"rlhf.engines": {"needy": "acme_needy:needy"}, "rlhf.hooks": {"acme-hook": "acme_needy"}}
    install("acme", targets, {"acme_needy": source})
    assert run(["plugins", "check", "fake-whisper"]) == 0
    assert run(["plugins", "check", "acme-hook"]) == 0
    assert run(["plugins", "check", "engine/needy"]) == 0
    assert "needs no_such_module_xyz, not installed here: pip install xyz" in capsys.readouterr().out
    install("bolt", {"rlhf.engines": {"cracked": "bolt_absent:thing"}, "rlhf.rewards": {"fake-shout": "x:y"}})
    assert run(["plugins", "check", "cracked"]) == 1
    assert "broken" in capsys.readouterr().out
    assert run(["plugins", "check", "fake-shout"]) == 1
    assert "fake-plugins 1.2.3" in capsys.readouterr().out


def test_generate_prints_each_answer(monkeypatch, capsys):
    asked = {}

    def generate_answers(run, prompts, *, temperature, seed):
        asked.update(run, temperature=temperature, seed=seed)
        return [{"completion": text.upper()} for text in prompts]

    provide(monkeypatch, "rlhf_cli.answers", generate_answers=generate_answers)
    assert run(["generate", "--model", "m", "--prompt", "a", "--prompt", "b"]) == 0
    assert capsys.readouterr().out == "A\nB\n"
    assert (asked["temperature"], asked["engine"]) == (0.0, {"name": "hf", "max_new_tokens": 128})
    assert run(["generate", "--model", "m", "--prompt", "a", "--json", "--temperature", "0.5", "--seed", "4"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"prompt": "a", "completion": "A"}]
    assert (asked["model"], asked["temperature"], asked["seed"]) == ({"path": "m", "device": "auto"}, 0.5, 4)


def test_version_names_the_parts(capsys):
    assert run(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert versions["fake-plugins"] == "1.2.3"
    assert {"rlhf-core", "python", "torch"} <= set(versions)


def test_a_plugin_adds_a_command_that_is_imported_when_run(install, capsys):
    source = "import click\n\n@click.command()\ndef hello():\n    click.echo('hello from acme')\n\nother = 3\n"
    commands = {"acme-hello": "acme_cmd:hello", "acme-broken": "acme_none:x", "acme-odd": "acme_cmd:other"}
    install("acme", {"rlhf.commands": commands}, {"acme_cmd": source})
    assert run(["--help"]) == 0
    assert "acme-hello From acme 1.2.3." in " ".join(capsys.readouterr().out.split())
    assert "acme_cmd" not in sys.modules
    assert run(["acme-hello"]) == 0
    assert capsys.readouterr().out == "hello from acme\n"
    assert run(["acme-broken"]) == 2
    assert 'command "acme-broken" (acme 1.2.3): cannot import' in capsys.readouterr().err
    assert run(["acme-odd"]) == 2
    assert "is a int, not a click command" in capsys.readouterr().err


def leaves(command, path=()):
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from leaves(command.get_command(None, name), (*path, name))
    else:
        yield path, command


def test_every_command_has_help_with_examples_and_described_options():
    found = [(path, command) for path, command in leaves(cli) if path[0] in COMMANDS]  # not those of plugins
    assert {path[0] for path, _ in found} == set(COMMANDS)
    for path, command in found:
        help_text = CliRunner().invoke(cli, [*path, "--help"], prog_name="rlhf").output
        assert "Examples:" in help_text, path
        assert f"rlhf {' '.join(path)}" in help_text, path
        assert all(getattr(option, "help", "") for option in command.params if hasattr(option, "is_flag")), path


def test_the_flags_of_train_are_the_contract():
    flags = {flag for parameter in train_command.params for flag in parameter.opts}
    assert flags >= {
        "--algorithm", "--strategy", "--transport", "--engine", "--reward", "--environment", "--model",
        "--num-processes", "--set", "--output", "--resume", "--restart", "--dry-run", "--verbose", "--quiet",
    }  # fmt: skip


def test_main_exits_with_the_code_of_the_run(monkeypatch):
    with pytest.raises(SystemExit) as left:
        main_module.main(["trian"])
    assert left.value.code == 2


def test_what_everyone_types_first_is_heard(capsys):
    assert run(["--version"]) == 0
    assert "rlhf-core" in capsys.readouterr().out
    assert run(["train", "-h"]) == 0
    assert "Usage: rlhf train" in capsys.readouterr().out


@pytest.mark.slow
def test_the_schema_is_written_to_a_file_for_the_editor(tmp_path, capsys):
    file = tmp_path / "run.schema.json"
    assert run(["config", "schema", "--output", str(file)]) == 0
    assert "# yaml-language-server: $schema=run.schema.json" in capsys.readouterr().out
    assert run(["config", "schema"]) == 0
    assert file.read_text() == capsys.readouterr().out
    assert run(["config", "schema", "--output", str(tmp_path / "none" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
