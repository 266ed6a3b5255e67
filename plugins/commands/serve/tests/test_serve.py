"""A model that is served: from a folder, and from what a run has written."""

import asyncio
import json
import os
import pty
import re
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

import dialect_clients
import openai
import psutil
import pytest
from adding_agent import ADD, QUESTION
from dialect_clients import CLIENTS
from running import PATIENCE_SECONDS, wait_until
from served_clients import served_client
from tool_models import CALL

from rlhf_cli.answers import generate_answers
from rlhf_cli.main import run
from rlhf_core import train
from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_episodes import Endpoint
from rlhf_serve.serving import model_of
from rlhf_testing.models import save_tiny_model
from rlhf_testing.runs import tiny_run


def client_of(path, *, max_new_tokens=32):
    """The real client of a model that is served."""
    return served_client(ModelConfig(path=model_of(str(path)), device="cpu"), max_new_tokens=max_new_tokens)


async def complete(client, prompt, **options):
    return (await client.completions.create(model="mine", prompt=prompt, **options)).choices[0].text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_greedy_text_is_that_of_generate_and_a_seed_repeats(tiny):
    run = {"model": {"path": str(tiny), "device": "cpu"}, "engine": {"name": "hf", "max_new_tokens": 8}}
    (line,) = generate_answers(run, ["31>"])
    expected = line["completion"]

    async def ask():
        async with client_of(tiny, max_new_tokens=8) as client:
            assert await complete(client, "31>", temperature=0) == expected
            sampled = await asyncio.gather(*(complete(client, "31>", seed=seed) for seed in (7, 7, 8, 9)))
            assert sampled[0] == sampled[1] and len(set(sampled)) > 1
            assert await complete(client, "31>", seed=7) == sampled[0]
            assert [model.id async for model in await client.models.list()] == ["mine"]
            with pytest.raises(openai.BadRequestError) as caught:
                await complete(client, "1" * 600)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="chat messages"):
                await client.chat.completions.create(model="mine", messages=QUESTION)

    asyncio.run(ask())


def test_a_chat_model_calls_tools(tool_model):
    async def ask():
        async with client_of(tool_model, max_new_tokens=90) as client:
            asked = {"model": "mine", "messages": QUESTION, "temperature": 0}
            found = (await client.chat.completions.create(**asked, tools=[ADD])).choices[0]
            assert found.finish_reason == "tool_calls"
            assert found.message.tool_calls[0].function.arguments == '{"a": 1, "b": 2}'
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, tools=[ADD], stream=True)]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            again = [*QUESTION, found.message.model_dump(exclude_none=True)]
            again.append({"role": "tool", "tool_call_id": found.message.tool_calls[0].id, "content": "3"})
            told = await client.chat.completions.create(model="mine", messages=again, tools=[ADD], max_tokens=2)
            assert told.usage.prompt_tokens > len(CALL) and told.usage.completion_tokens <= 2

    asyncio.run(ask())


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_chat_model_calls_tools_in_every_dialect(tool_model, kind):
    async def ask():
        async with client_of(tool_model, max_new_tokens=90) as client:
            endpoint = Endpoint(base_url=str(client.base_url).removesuffix("/"), api_key=client.api_key, model="mine")
            async with dialect_clients.client_of(kind, endpoint) as asking:
                asked = asking.user(QUESTION[0]["content"])
                first = await asking.ask(asked, tools=True, temperature=0)
                assert (first.calls, first.reason) == ([("add", {"a": 1, "b": 2})], "tools")
                streamed = await asking.ask(asked, tools=True, temperature=0, stream=True)
                assert (streamed.calls, streamed.num_tokens) == (first.calls, first.num_tokens)
                told = [*asked, *first.back, *asking.result(first, "3")]
                second = await asking.ask(told, tools=True, max_tokens=2)
                assert second.num_tokens[0] > len(CALL) and second.num_tokens[1] <= 2
                if kind is not dialect_clients.Chat:
                    assert await asking.count(told, tools=True) == second.num_tokens[0]

    asyncio.run(ask())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    changes = {"checkpoint": {"every_episodes": 1}, "optimizer": {"lr": 0.05}}
    return train(tiny_run(changes), output=tmp_path_factory.mktemp("runs") / "run").run_folder


def test_of_a_run_its_model_is_served(run_folder):
    assert model_of(str(run_folder)) == str(run_folder / "model")

    async def answer(path):
        async with client_of(path, max_new_tokens=8) as client:
            return await complete(client, "31>", seed=3)

    assert asyncio.run(answer(run_folder)) == asyncio.run(answer(run_folder / "model"))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_goes_on_says_how_a_checkpoint_becomes_a_model(run_folder, tmp_path, resumed):
    going_on = tmp_path / "going-on"
    shutil.copytree(run_folder, going_on)
    if resumed:
        summary = json.loads((run_folder / "summary.json").read_text())
        (going_on / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    else:
        shutil.rmtree(going_on / "model")
    with pytest.raises(UserInputError, match="not written a model yet") as told:
        model_of(str(going_on))
    assert f"rlhf export {going_on} --to DIR" in str(told.value)


def test_the_key_is_not_written_to_a_log(capsys, monkeypatch, tiny):
    assert run(["serve", str(tiny)]) == 2
    assert "--api-key-env" in capsys.readouterr().err
    monkeypatch.delenv("SERVE_KEY", raising=False)
    assert run(["serve", str(tiny), "--api-key-env", "SERVE_KEY"]) == 2
    assert "SERVE_KEY is not set" in capsys.readouterr().err


def test_without_the_distribution_it_is_said_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("rlhf_core.plugins.discovery._installed", dict)
    assert run(["serve", "runs/first"]) == 2
    assert "pip install rlhf-serve" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(capsys, monkeypatch, tiny):
    monkeypatch.setenv("SERVE_KEY", "a-key")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["serve", str(tiny), "--port", port, "--api-key-env", "SERVE_KEY", "--device", "cpu"]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_the_command_serves_until_a_signal(monkeypatch, capfd, tiny):
    shown, answers, ended = [], [], threading.Event()

    def told(pattern):
        shown.append("\n".join(capfd.readouterr()))
        return ended.is_set() or re.search(pattern, "\n".join(shown))

    def ask_and_stop():
        wait_until(lambda: told(r"key: \S+"), "the key")
        if ended.is_set():
            return
        try:
            with openai.OpenAI(base_url=told(r"at (http://\S+)")[1], api_key=told(r"key: (\S+)")[1]) as client:
                answers.append(client.completions.create(model=tiny.name, prompt="31>", max_tokens=4).choices[0].text)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    asking = threading.Thread(target=ask_and_stop)
    asking.start()
    try:
        assert run(["serve", str(tiny), "--port", "0", "--device", "cpu"]) == 0
    finally:
        ended.set()
        asking.join(PATIENCE_SECONDS)
    assert answers and capfd.readouterr().out == "stopped\n"


@pytest.mark.slow
def test_the_command_serves_on_loopback_until_ctrl_c(tiny):
    ours, theirs = pty.openpty()
    command = [Path(sys.executable).parent / "rlhf", "serve", tiny, "--port", "0", "--device", "cpu"]
    process = psutil.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        shown = read_until(ours, r"key: (\S+)")
        url, key = re.search(r"at (http://\S+)", shown)[1], re.search(r"key: (\S+)", shown)[1]
        places = [each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        assert places == ["127.0.0.1"]
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            assert client.completions.create(model=tiny.name, prompt="31>", max_tokens=4).usage.completion_tokens <= 4
        process.send_signal(signal.SIGINT)
        assert "stopped" in read_until(ours, "stopped")
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        if process.is_running():
            process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal, pattern):
    shown = ""
    while not re.search(pattern + r"\s", shown):
        shown += os.read(terminal, 4096).decode()
    return shown
