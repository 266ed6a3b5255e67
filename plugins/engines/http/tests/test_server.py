"""A server that is killed, restarted, shared, or not set up for training."""

from __future__ import annotations

import logging
import threading
import time

import httpx2 as httpx
import pytest
from generation_server import generation_server

from rlhf_core.errors import ConfigError, DivergenceError, EngineLostError, SyncError, UserInputError
from rlhf_core.types import SamplingParams
from rlhf_engine_http.config import HttpEngineConfig
from rlhf_engine_http.weights import WeightsFolder
from rlhf_testing.contracts.engine import Bench, make_requests
from rlhf_testing.tiny import contract_tokenizer, perturb
from rlhf_web import RemoteError

LONG = SamplingParams(max_new_tokens=60)


def gap(engine, module, answers, requests) -> float:
    bench = Bench(engine, module, module, contract_tokenizer())
    return bench.gap_of(requests, answers, 1.0)


@pytest.mark.slow
def test_a_restarted_server_gets_the_weights_again(server, module, make_engine, caplog):
    engine = make_engine(server, module)
    perturb(module, seed=1)
    engine.weights_updated(3)
    requests = make_requests(8)
    answers = {}

    def kill_and_restart():
        time.sleep(0.1)
        server.kill()
        server.start()

    with caplog.at_level(logging.WARNING, logger="rlhf.engine.http"):
        restart = threading.Thread(target=kill_and_restart)
        restart.start()
        answers = {each.sample_id: each for each in engine.generate(requests, LONG)}
        restart.join()
    assert sorted(answers) == [request.sample_id for request in requests]
    assert {each.policy_version for each in answers.values()} == {3}
    assert gap(engine, module, answers, requests) < 1e-4
    assert f"{server.url} was restarted and has the weights 'default'" in caplog.text


@pytest.mark.parametrize("server", ["vllm"], indirect=True)
@pytest.mark.slow
def test_a_restart_between_two_batches_is_noticed(server, module, make_engine):
    engine = make_engine(server, module)
    requests = make_requests(4)
    before = {each.sample_id: each.token_ids for each in engine.generate(requests, LONG)}
    server.kill()
    server.start()
    after = {each.sample_id: each.token_ids for each in engine.generate(requests, LONG)}
    assert after == before


@pytest.mark.parametrize("server", ["vllm"], indirect=True)
@pytest.mark.slow
def test_a_server_that_stays_lost_is_an_error_with_its_address(server, module, make_engine):
    engine = make_engine(server, module, patience_seconds=0.5)
    list(engine.generate(make_requests(1), LONG))
    server.kill()
    with pytest.raises(EngineLostError, match=f"{server.url}.*gave up") as caught:
        list(engine.generate(make_requests(2), LONG))
    assert "engine.url" in caught.value.hint


@pytest.mark.parametrize("server", ["vllm"], indirect=True)
@pytest.mark.slow
def test_a_server_that_responds_while_its_engine_is_dead_is_waited_for(server, module, make_engine, monkeypatch):
    engine = make_engine(server, module)
    list(engine.generate(make_requests(1), LONG))
    post, until = engine._server._answers.post, time.monotonic() + 1.0

    async def dead(*arguments, **options):
        if time.monotonic() < until:
            raise RemoteError(f"{server.url}: status 500: EngineDeadError", is_lost=True)
        return await post(*arguments, **options)

    monkeypatch.setattr(engine._server._answers, "post", dead)
    assert len(list(engine.generate(make_requests(2), LONG))) == 2


@pytest.mark.parametrize("server", ["vllm"], indirect=True)
@pytest.mark.slow
def test_a_server_that_is_lost_before_its_log_probs_are_checked(server, module, make_engine, monkeypatch):
    engine = make_engine(server, module)
    check, restart = engine._server.check_logprobs, threading.Timer(0.3, server.start)

    async def lost(prompt_ids):
        server.kill()
        restart.start()
        try:
            await check(prompt_ids)
        finally:
            restart.join()

    monkeypatch.setattr(engine._server, "check_logprobs", lost)
    assert len(list(engine.generate(make_requests(2), LONG))) == 2


@pytest.mark.parametrize("server", ["vllm"], indirect=True)
def test_a_server_that_was_never_there(server, module, make_engine, caplog):
    server.kill()
    with (
        caplog.at_level(logging.WARNING, logger="rlhf.engine.http"),
        pytest.raises(EngineLostError, match=f"unreachable: {server.url}"),
    ):
        make_engine(server, module, patience_seconds=0.3)
    assert "Waiting at most 0.3 s for the server" in caplog.text
    server.start()
    make_engine(server, module)  # the server is not reserved any more


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_log_probs_before_temperature_are_refused(kind, base_folder, module, make_engine):
    with generation_server(kind, base_folder, raw_logprobs=True) as server:
        engine = make_engine(server, module)
        with pytest.raises(ConfigError, match="from before temperature") as caught:
            list(engine.generate(make_requests(1), LONG))
    assert ("--logprobs-mode processed_logprobs" if kind == "vllm" else "SGLANG_RETURN") in str(caught.value)


@pytest.mark.slow
def test_weights_of_another_run_are_an_error(base_folder, module, make_engine):
    with generation_server("vllm", base_folder) as server:
        engine = make_engine(server, module)
        list(engine.generate(make_requests(1), LONG))
        httpx.post(f"{server.url}/pause?mode=keep", json={}).raise_for_status()
        httpx.post(f"{server.url}/update_weight_version", json={"new_version": "rlhf-other-1"}).raise_for_status()
        httpx.post(f"{server.url}/resume", json={}).raise_for_status()
        with pytest.raises(SyncError, match="another run changed the weights"):
            list(engine.generate(make_requests(1), LONG))


@pytest.mark.slow
def test_each_engine_has_its_own_server(base_folder, module, tmp_path, make_engine):
    with generation_server("vllm", base_folder) as first, generation_server("vllm", base_folder) as second:
        urls = [first.url, second.url]
        engines = [make_engine(first, module, url=urls) for _ in range(2)]
        assert sorted(each._server.url for each in engines) == sorted(urls)
        config = HttpEngineConfig(url=urls, weights_folder=str(tmp_path / "w"))
        with pytest.raises(ConfigError, match="already serves another process"):
            WeightsFolder.claim(config, seconds=0.0)
        engines[0].close()
        WeightsFolder.claim(config, seconds=0.0).close()


def test_the_key_is_sent_and_never_shown(base_folder, module, make_engine, monkeypatch):
    with generation_server("vllm", base_folder, key="sesame-4711") as server:
        with pytest.raises(ConfigError, match="401") as caught:
            make_engine(server, module)
        assert "engine.api_key_env" in str(caught.value)
        with pytest.raises(UserInputError, match="GATE_KEY is not set"):
            make_engine(server, module, api_key_env="GATE_KEY")
        monkeypatch.setenv("GATE_KEY", "sesame-4712")
        with pytest.raises(ConfigError, match="401") as caught:
            make_engine(server, module, api_key_env="GATE_KEY")
        assert "sesame" not in str(caught.value)
        monkeypatch.setenv("GATE_KEY", "sesame-4711")
        engine = make_engine(server, module, api_key_env="GATE_KEY")
        assert len(list(engine.generate(make_requests(2), LONG))) == 2


def test_a_folder_that_the_server_cannot_read(server, module, make_engine):
    engine = make_engine(server, module, server_weights_folder="/nowhere")
    with pytest.raises(SyncError, match="did not take the new weights") as caught:
        list(engine.generate(make_requests(1), LONG))
    assert "can it read /nowhere/" in caught.value.hint and "engine.weights_folder" in caught.value.hint


def test_a_server_of_the_other_kind(server, module, make_engine):
    other = {"vllm": "sglang", "sglang": "vllm"}[server.kind]
    with pytest.raises(ConfigError, match="status 404") as caught:
        make_engine(server, module, kind=other)
    assert caught.value.hint.startswith("start it as")


@pytest.mark.parametrize("server", ["vllm"], indirect=True)
def test_files_hold_the_current_version_only(server, module, make_engine, tmp_path):
    engine = make_engine(server, module, max_shard_bytes=20_000)
    for version in range(1, 4):
        engine.weights_updated(version)
        (folder,) = [each for each in (tmp_path / "w").iterdir() if each.is_dir()]
        (current,) = folder.iterdir()
        assert current.name.endswith(f"-{version}") and len(list(current.iterdir())) > 1
    engine.close()
    assert [each.suffix for each in (tmp_path / "w").iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_server_that_was_left_paused_goes_on(base_folder, module, make_engine):
    with generation_server("vllm", base_folder) as server:
        httpx.post(f"{server.url}/pause?mode=keep", json={}).raise_for_status()
        engine = make_engine(server, module)
        assert len(list(engine.generate(make_requests(2), LONG))) == 2


@pytest.mark.parametrize("server", ["vllm"], indirect=True)
@pytest.mark.slow
def test_a_diverged_policy_is_named(server, module, make_engine):
    engine = make_engine(server, module)
    list(engine.generate(make_requests(1), LONG))
    answer = engine._loop.run(engine._server.answer(engine._job(make_requests(1)[0], LONG), [2]))
    object.__setattr__(answer, "logprobs", [float("-inf")] * len(answer.logprobs))
    with pytest.raises(DivergenceError, match="not finite"):
        engine._completion(engine._job(make_requests(1)[0], LONG), answer)
