"""The service without a model: failures, limits and what a killed server leaves."""

import asyncio
import json

import httpx
import pytest
from service_alone import MODEL, FakeRanks, create, result, running, session, step
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from rlhf_core.errors import UserInputError
from rlhf_serve_training.app import Tenants, make_app
from rlhf_web import Refused


@pytest.fixture
def ranks():
    return FakeRanks()


def test_requests_of_a_model_that_cannot_be_created_fail(tmp_path, ranks):
    ranks.errors["create"] = UserInputError("no memory", where="x")

    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            with service._changed:  # so that both are waiting before the thread takes one
                created = create(service, session_id)
                waiting = step(service, MODEL.format(session_id), 1)
            assert "no memory" in (await result(service, created))["error"]
            assert "could not be created" in (await result(service, waiting))["error"]
            assert create(service, session_id) == created  # sent again: the same result, and no model
            assert service.store.rows("SELECT 1 FROM models") == []

    asyncio.run(run())


def test_an_unforeseen_error_of_a_sample_fails_this_request_only(tmp_path, ranks, monkeypatch):
    def broken(*arguments):
        raise OverflowError

    monkeypatch.setattr("rlhf_serve_training.sample_turns.sample_order", broken)

    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            request = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "base"}
            sampler = service.create_sampler("a", types.CreateSamplingSessionRequest.model_validate(request))
            prompt = {"chunks": [{"tokens": [5], "type": "encoded_text"}]}
            body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {}}
            request_id, _ = service.sample("a", json.dumps(body).encode())
            assert await result(service, request_id) == {
                "error": "the server failed (OverflowError)",
                "category": "server",
            }
            await service.result("a", create(service, session_id), 10)  # the thread is alive

    asyncio.run(run())


def test_unloading_needs_no_room(tmp_path, ranks):
    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            await result(service, create(service, session_id))
        async with running(tmp_path, ranks, disk_bytes=1) as service:
            with pytest.raises(Refused, match="the disk limit"):
                step(service, MODEL.format(session_id), 1)
            request = types.UnloadModelRequest(model_id=MODEL.format(session_id))
            unloaded = service.unload("a", request, request.model_dump_json().encode())
            assert (await result(service, unloaded))["type"] == "unload_model"

    asyncio.run(run())


def test_a_request_that_ends_the_server_is_not_begun_for_ever(tmp_path, ranks):
    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            model_id = MODEL.format(session_id)
            await result(service, create(service, session_id))
        async with running(tmp_path, ranks) as service:
            with service._changed:
                first = step(service, model_id, 1, learning_rate=0.1)
                for _ in range(3):
                    service.store.begin(first)  # three servers ended
            assert "the server ended 3 times" in (await result(service, first))["error"]
            assert "metrics" in await result(service, step(service, model_id, 2))
        ranks.calls.clear()
        async with running(tmp_path, ranks) as service:
            await result(service, step(service, model_id, 3))
        assert [method for method, _ in ranks.calls] == ["create", "optim_step", "optim_step"]  # the first is not made

    asyncio.run(run())


def test_a_step_that_an_unforeseen_error_ended_is_not_made_at_a_restart(tmp_path, ranks):
    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            model_id = MODEL.format(session_id)
            await result(service, create(service, session_id))
            ranks.errors["optim_step"] = MemoryError()
            failed = await result(service, step(service, model_id, 1))
            assert failed == {"error": "the server failed (MemoryError)", "category": "server"}
            ranks.errors.clear()
            ranks.calls.clear()
            await result(service, step(service, model_id, 2))
            assert [method for method, _ in ranks.calls] == ["create", "optim_step"]  # restored without the failed step

    asyncio.run(run())


def test_an_evicted_model_is_restored_from_its_state(tmp_path, ranks):
    async def run():
        async with running(tmp_path, ranks) as service:  # one adapter in memory
            session_id = session(service)
            for seq in (0, 1):
                await result(service, create(service, session_id, seq))
                await result(service, step(service, f"{session_id}:train:{seq}", 1))
            ranks.calls.clear()
            await result(service, step(service, f"{session_id}:train:0", 2))
            assert [method for method, _ in ranks.calls] == ["save_state", "unload", "load", "optim_step"]

    asyncio.run(run())


def test_folders_that_the_journal_lacks_are_deleted(tmp_path, ranks):
    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            await result(service, create(service, session_id))
            known = tmp_path / "states" / "m" / "3"
            service.store.change("UPDATE models SET state=?", str(known))
        left = [tmp_path / "states" / "m" / "5", tmp_path / "checkpoints" / "m" / "weights" / "x-1"]
        for folder in (known, *left):
            folder.mkdir(parents=True)
        async with running(tmp_path, ranks):
            assert known.exists()
            assert not any(folder.exists() for folder in left)

    asyncio.run(run())


def test_a_strategy_with_one_adapter_refuses_a_second_model_by_name(tmp_path, ranks):
    ranks.worker.options.is_owning = True

    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            created = create(service, session_id)
            assert "model_id" in await result(service, created)
            assert create(service, session_id) == created
            with pytest.raises(Refused, match="holds one adapter, and it is in use"):
                create(service, session_id, 1)
            request = types.UnloadModelRequest(model_id=MODEL.format(session_id))
            service.unload("a", request, request.model_dump_json().encode())
            assert "model_id" in await result(service, create(service, session_id, 1))

    asyncio.run(run())


@pytest.mark.parametrize("is_owning", [False, True])
def test_a_failed_pass_restores_an_adapter_whose_gradients_the_strategy_has(tmp_path, ranks, is_owning):
    ranks.worker.options.is_owning = is_owning
    ranks.errors["forward"] = UserInputError("not finite", where="x")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7], "weights": [1.0, 1.0]}
    )

    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            await result(service, create(service, session_id))
            inner = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
            model_id = MODEL.format(session_id)
            message = types.ForwardBackwardRequest(forward_backward_input=inner, model_id=model_id, seq_id=1)
            body = forward_backward_request_to_proto(message).SerializeToString()
            request_id = service.train("a", "forward_backward", body)
            assert "not finite" in (await result(service, request_id))["error"]
            await result(service, step(service, model_id, 2))
            assert [each for each, _ in ranks.calls].count("create") == (2 if is_owning else 1)

    asyncio.run(run())


def test_a_tenant_leaves_connections_to_the_others(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr("rlhf_serve_training.app.MAX_CONNECTIONS", 64 + 2 * 3)  # three for each of two
    keys = {name: f"tml-{name * 30}" for name in ("a", "b")}

    async def run():
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            await result(service, create(service, session_id))
            waiting = step(service, MODEL.format(session_id), 2)  # its number 1 is missing
            app = make_app(service, None, Tenants(keys), host="127.0.0.1", tokenizer="")
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000"
            ) as client:

                async def poll(tenant):
                    path, headers = "/api/v1/retrieve_future", {"x-api-key": keys[tenant]}
                    return await client.post(path, json={"request_id": waiting}, headers=headers, timeout=30)

                polls = [asyncio.create_task(poll("a")) for _ in range(3)]
                await asyncio.sleep(0.2)
                answer = await poll("a")
                assert (answer.status_code, answer.json()["code"]) == (429, "too_many_open")
                assert (await poll("b")).status_code == 404  # it is of another tenant
                await result(service, step(service, MODEL.format(session_id), 1))
                assert [each.status_code for each in await asyncio.gather(*polls)] == [200] * 3
                assert (await poll("a")).status_code == 200

    asyncio.run(run())
