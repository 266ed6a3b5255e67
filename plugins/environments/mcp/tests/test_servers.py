"""Servers of every kind, each a process: a real one of the library, and those that do what none should."""

import json
import logging
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from playing import Reworded
from running import wait_until

from rlhf_core import train
from rlhf_core.config.problems import Problems
from rlhf_core.errors import ConfigError, EpisodeError
from rlhf_core.plugins.trust import FileTrust
from rlhf_core.types import SamplingParams
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.contracts import EnvironmentContract
from rlhf_testing.episodes import episode_tokenizer, prompt_stream
from rlhf_testing.models import tiny_model
from rlhf_testing.runs import tiny_run

pytest.importorskip("mcp", reason="needs the MCP library: make setup-extras")

pytestmark = pytest.mark.slow

CALCULATOR = [sys.executable, str(Path(__file__).with_name("calculator.py"))]
SCRIPTED = [sys.executable, str(Path(__file__).with_name("scripted.py"))]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


GO = call("go")


class TestCalculator(EnvironmentContract):
    plugin = "mcp"
    options = {"command": CALCULATOR, "setup_tool": "begin", "reward_tool": "score", "tools": ["add", "divide"]}
    records = [{"prompt": "", "answer": "3"}, {"prompt": "Hm.", "answer": "5"}]
    replies = (call("add", number=3), call("add", number=2), call("divide", number=0), call("multiply"), "I am done.")


def play(folder, command, *replies, sight=None, **options):
    """The episode of a policy that says these replies, and then that it is done."""
    problems = Problems()
    environment = resolve_environment({"name": "mcp", "command": command, **options}, problems)
    problems.raise_if_any("test")
    tokenizer = episode_tokenizer(chat=True)
    player = build_environment_player(
        environment,
        Reworded(tokenizer, [*replies, "Done."]),
        tokenizer,
        sampling=SamplingParams(max_new_tokens=200),
        seed=0,
        base_folder=folder,
        sight=sight,
    )
    task = {"prompt": [{"role": "user", "content": "Go."}], "answer": "3"}
    prompt = prompt_stream([task], tokenizer, seed=0).prompt(0)
    (played,) = player.play([(prompt, 0)])
    return played


def observations(played):
    """What the tools answered."""
    return [turn.text for turn in played.rows[0].turns if turn.role == "environment"]


def test_calls_and_what_is_wrong_with_them(tmp_path):
    replies = (call("add", number=2), call("add", number="1"), call("divide", number=0), call("score", seed=3))
    played = play(tmp_path, CALCULATOR, *replies, reward_tool="score")
    assert (
        played.reward,
        played.rows[0].columns["environment"]["own/tool_errors"],
        played.rows[0].columns["environment"]["truncated"],
    ) == (1.0, 1.0, 0.0)
    found = observations(played)
    assert found[:2] == ["2", "3"]
    assert "Error executing tool divide" in found[2] and "there is no tool" in found[3]


def test_unknown_tools_and_wrong_arguments_are_counted(tmp_path):
    """The server is asked all the same: it may convert what it gets."""
    wrong = (call("add"), call("add", number="1"), call("add", number={}), call("multiply"), call("score", seed=3))
    played = play(tmp_path, CALCULATOR, call("add", number=2), *wrong, reward_tool="score")
    assert played.rows[0].columns["environment"]["bad_tool_calls"] == len(wrong)
    assert observations(played)[2] == "3" and played.reward == 1.0


def test_images_of_a_result_are_parts():
    from mcp.types import CallToolResult, ImageContent, TextContent

    from rlhf_mcp.tools import result_content, result_text

    text, image = TextContent(type="text", text="Done."), ImageContent(type="image", data="AAAA", mime_type="image/png")
    shown = CallToolResult(content=[text, image, TextContent(type="text", text="More")])
    assert result_content(shown, 6) == [
        {"type": "text", "text": "Done."},
        {"type": "image", "base64": "AAAA", "required": False},
        {"type": "text", "text": "M"},
    ]
    assert (
        result_content(CallToolResult(content=[text]), 99) == result_text(CallToolResult(content=[text]), 99) == "Done."
    )


SCHEMAS = {
    "fits": ({"required": ["a"], "properties": {"a": {"type": "integer"}}, "additionalProperties": False}, True),
    "missing": ({"required": ["b"]}, False),
    "another type": ({"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [2]}]}}}, False),
    "no schema": ({"type": 3}, True),
    "pattern": ({"properties": {"text": {"pattern": "^(x+)+$"}}}, True),
    "patterns": ({"patternProperties": {"^(x+)+$": {}}, "additionalProperties": False}, True),
    "loop": ({"$ref": "#"}, True),
    "remote": ({"$ref": "http://localhost:1/schema"}, True),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_arguments_are_checked_against_the_schema(name):
    from mcp.types import Tool

    from rlhf_mcp.tools import fits_schema

    schema, fits = SCHEMAS[name]
    tool = Tool(name="go", input_schema={"type": "object", **schema})
    slow = {"text": "x" * 60 + "!", "x" * 60 + "!": 1} if "pattern" in name else {"a": 1}
    assert fits_schema(tool, slow) is fits


def test_the_policy_gets_the_tools_it_is_to_have_and_the_task(tmp_path):
    played = play(tmp_path, CALCULATOR, call("divide", number=1), tools=["add"], setup_tool="begin")
    (row,) = played.rows
    assert "Reach 3." in row.text and "Add to the total." in row.text
    assert "Divide" not in row.text and "Say what to do" not in row.text
    assert observations(played) == ["error: there is no tool 'divide'; there are: add"]


def test_a_server_gets_the_variables_that_are_named_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_SERVER", "1")
    monkeypatch.setenv("A_SECRET", "2")
    (listed,) = observations(play(tmp_path, CALCULATOR, call("environment"), env=["OF_THE_SERVER"]))
    assert set(listed.split()) <= {"HOME", "LC_CTYPE", "OF_THE_SERVER", "PATH"}
    with pytest.raises(ConfigError, match="NOT_THERE is not set"):
        play(tmp_path, CALCULATOR, env=["NOT_THERE"])


def test_a_broken_image_of_a_server_becomes_a_text_for_a_model_that_sees(tmp_path):
    pytest.importorskip("rlhf_vision")
    from rlhf_core.config import ModelConfig
    from rlhf_core.models import model_kind_for
    from rlhf_episodes.sight import Sight
    from rlhf_images import ImageLimits

    kind = model_kind_for(ModelConfig(path="builtin:tiny-vision", device="cpu"))
    played = play(tmp_path, [*SCRIPTED, "picture"], GO, sight=Sight(kind, ImageLimits(), tmp_path))
    (answered,) = observations(played)
    assert answered.startswith("[image not shown: ") and answered.endswith("a cat")


@pytest.mark.parametrize(
    ("mode", "answered"),
    [
        ("noise", "gone"),
        ("picture", "[image]\na cat"),
        ("chatty", "y" * 40 + "\n[499960 characters left out]"),
        ("refuse", "error: not today \\x1b[31m"),
    ],
)
def test_what_a_tool_answers(tmp_path, mode, answered):
    assert observations(play(tmp_path, [*SCRIPTED, mode], GO, max_output_chars=40)) == [answered]


def test_descriptions_hold_no_control_characters(tmp_path):
    (row,) = play(tmp_path, [*SCRIPTED, "control"]).rows
    assert '"description": "Go[2J on."' in row.text and '"title": "!"' in row.text


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("exit", r"failed while starting: it has ended \(end of its standard error: no licence\)"),
        ("flood", "failed while starting: it wrote more than 67108864 bytes"),
        ("line", "failed while starting: it wrote a line of more than 8388608 bytes"),
        ("broken", "failed while calling its tool go: it wrote an invalid message: {"),
        ("words", r"failed while calling its tool go: it has ended \(end of its standard error: e"),
        ("crash", r"failed while calling its tool go: it has ended \(end of its standard error: out of paper \\x1b"),
        ("wrong", "failed while calling its tool go: 1 validation error for CallToolResult"),
        ("many", "lists more than 128 tools"),
        ("pages", "lists more than 128 tools, or its list never ends"),
        ("wide", "describes its tools in more than 100000 characters"),
        ("twins", "lists two tools of the same name"),
        ("blank", "lists a tool with the invalid name 'go on'"),
        ("escape", r"lists a tool with the invalid name 'go\\x1b"),
        ("none", "does not offer any tool to the policy"),
    ],
)
def test_a_server_that_is_none(tmp_path, mode, said):
    with pytest.raises(EpisodeError, match=said):
        play(tmp_path, [*SCRIPTED, mode], GO)
    assert play(tmp_path, [*SCRIPTED, mode], GO, on_failure="drop").rows == ()


@pytest.mark.parametrize(("mode", "doing"), [("hang", "starting"), ("silent", "calling its tool go")])
def test_a_server_that_gives_no_answer(tmp_path, caplog, mode, doing):
    caplog.set_level(logging.WARNING)
    with pytest.raises(EpisodeError, match="did not return within 2 s"):
        play(tmp_path, [*SCRIPTED, mode], GO, timeout_seconds=2.0)
    wait_until(lambda: f"the MCP server was ended while {doing}" in caplog.text, "the log says so")


@pytest.mark.parametrize(("mode", "options"), [("stays", {}), ("stays", {"reward_tool": "not_there"}), ("leaves", {})])
def test_nothing_of_a_server_stays(tmp_path, mode, options):
    """Neither one that does not end when its input does, nor what it started; also where the episode failed."""
    with pytest.raises(ConfigError) if options else nullcontext():
        play(tmp_path, [*SCRIPTED, mode], GO, **options)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(runs, pids)), "the processes of the server are gone")


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (["./not-there"], {}, "not-there does not start: No such file"),
        (["./readme"], {}, "readme does not start: Permission denied"),
        (["no-such-program-anywhere"], {}, "no-such-program-anywhere does not start"),
        (CALCULATOR, {"tools": ["ad"]}, 'the server does not have a tool "ad"'),
        (CALCULATOR, {"reward_tool": "grade"}, 'the server does not have a tool "grade"'),
    ],
)
def test_what_no_episode_mends_ends_the_run(tmp_path, command, options, said):
    (tmp_path / "readme").write_text("read me")
    with pytest.raises(ConfigError, match=said) as raised:
        play(tmp_path, command, on_failure="drop", **options)
    assert "environment" in str(raised.value) and raised.value.hint


@pytest.mark.parametrize("command", [["python", "-c", "1"], CALCULATOR, ["./serve/../../serve"]])
def test_a_run_file_of_a_stranger_starts_what_lies_in_its_folder(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve").mkdir()
    for named, refused in ((command, True), (["./serve/me", *command], False)):
        problems = Problems()
        resolve_environment({"name": "mcp", "command": named}, problems, FileTrust(folder=tmp_path))
        assert len(problems) == refused
    with pytest.raises(ConfigError, match=r"(?s)environment.command: the program .* is not a file in .*--trust"):
        resolve_environment({"name": "mcp", "command": command}, problems, FileTrust(folder=tmp_path))
        problems.raise_if_any("theirs.yaml")


def test_a_program_that_a_signal_ends(tmp_path):
    program = tmp_path / "serve"
    program.write_text("#!/bin/sh\nkill -34 $$\n")
    program.chmod(0o700)
    with pytest.raises(EpisodeError, match="failed while starting: it has ended"):
        play(tmp_path, ["./serve"])


def test_a_program_of_the_working_folder(tmp_path):
    program = tmp_path / "serve"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {SCRIPTED[1]} plain\n")
    program.chmod(0o700)
    assert observations(play(tmp_path, ["./serve"], GO)) == ["gone"]


@pytest.fixture
def chat_model(tmp_path):
    """A model of random weights with a chat template, of whose tokens a third are calls."""
    tokenizer = episode_tokenizer(chat=True)
    tokenizer.add_tokens([call("add", number=number) for number in range(50)])
    model = tiny_model(tokenizer, hidden_size=16, num_layers=1, num_heads=2, seed=0)
    model.config.max_position_embeddings = 4096
    for saved in (tokenizer, model):
        saved.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_it_trains(tmp_path, chat_model):
    section = {"name": "mcp", "command": CALCULATOR, "setup_tool": "begin", "reward_tool": "score", "max_turns": 3}
    changes = {
        "model": {"path": chat_model},
        "environment": {**section, "tools": ["add"]},
        "prompts": {"name": "tasks"},
        "rewards": [],
        "engine": {"max_new_tokens": 3},
        "logging": {"samples": "all"},
        "train": {"prompts_per_episode": 2},
    }
    result = train(tiny_run(changes), output=tmp_path / "run")
    assert result.summary["status"] == "done"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8 and all("environment" in sample["rewards"] for sample in samples)
    turns = [turn for sample in samples for turn in sample["turns"]]
    assert {turn["role"] for turn in turns} == {"policy", "environment"}
    observed = {turn["text"] for turn in turns if turn["role"] == "environment"}
    assert all(text.replace("\n", "").isdigit() for text in observed), f"no sums of what was called: {observed}"


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("begin", "the tool begin failed: its result is not a number: 'Reach 3.'"),
        ("divide", "tool divide failed: E"),
    ],
)
def test_a_tool_that_gives_no_reward(tmp_path, tool, said):
    with pytest.raises(EpisodeError, match=said):
        play(tmp_path, CALCULATOR, reward_tool=tool)
