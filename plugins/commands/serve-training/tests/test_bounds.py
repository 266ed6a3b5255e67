"""Bounds on the queue, the disk and the journal, without a model."""

import asyncio
import json
from pathlib import Path

import pytest
from service_alone import MODEL, FakeRanks, create, result, running, session, step
from tinker import types

from rlhf_core.errors import UserInputError
from rlhf_web import Refused


def save(service, model_id, seq, name):
    body = {"model_id": model_id, "seq_id": seq, "path": name, "type": "save_weights"}
    return service.train("a", "save_weights", json.dumps(body).encode())


def unload(service, model_id):
    request = types.UnloadModelRequest(model_id=model_id)
    return service.unload("a", request, request.model_dump_json().encode())


class SavingRanks(FakeRanks):
    """Ranks that write a file of 1000 bytes for each checkpoint."""

    def call(self, method, **arguments):
        if method == "save":
            folder = Path(arguments["folder"])
            folder.mkdir(parents=True)
            (folder / "adapter_model.safetensors").write_bytes(bytes(1000))
        return super().call(method, **arguments)


def test_a_full_queue_accepts_only_the_next_request(tmp_path):
    async def run():
        async with running(tmp_path, FakeRanks(), queued_requests=2) as service:
            session_id = session(service)
            await result(service, create(service, session_id))
            model_id = MODEL.format(session_id)
            ids = [step(service, model_id, seq, learning_rate=0.1) for seq in (3, 2)]  # wait for the first
            with pytest.raises(Refused, match="2 requests wait") as caught:
                step(service, model_id, 4)
            assert (caught.value.status, caught.value.code) == (429, "queue_full")
            ids.append(step(service, model_id, 1))
            for request_id in ids:
                assert "metrics" in await result(service, request_id)

    asyncio.run(run())


def test_a_checkpoint_beyond_the_limit_is_not_kept(tmp_path):
    async def run():
        async with running(tmp_path, SavingRanks(), disk_bytes=4000) as service:
            session_id = session(service)
            await result(service, create(service, session_id))
            model_id = MODEL.format(session_id)
            assert "path" in await result(service, save(service, model_id, 1, "one"))
            assert "path" in await result(service, save(service, model_id, 2, "two"))
            assert "the disk limit" in (await result(service, save(service, model_id, 3, "three")))["error"]
            names = sorted(each.name for each in (tmp_path / "checkpoints").glob("*/*/*"))
            assert names == ["one-1", "two-2"]

    asyncio.run(run())


def test_a_tenant_whose_disk_is_full_can_delete_checkpoints(tmp_path):
    """Its client needs a session for that, and may need a new one."""

    async def run():
        async with running(tmp_path, SavingRanks(), disk_bytes=4000) as service:
            session_id = session(service)
            await result(service, create(service, session_id))
            model_id = MODEL.format(session_id)
            path = (await result(service, save(service, model_id, 1, "one")))["path"]
            used = service.store.used_bytes("a")
            service.store.change("UPDATE requests SET body=zeroblob(?) WHERE owner=?", 8001 - used, model_id)
            service._disk._known.clear()
            with pytest.raises(Refused, match="delete checkpoints"):
                step(service, model_id, 2)
            session(service, "another client")
            service.delete_checkpoint("a", path)
            service._disk._known.clear()
            step(service, model_id, 2)

    asyncio.run(run())


def test_errors_of_a_model_that_could_not_be_created_are_kept(tmp_path):
    """The model is forgotten at once, but not what its client waits for."""

    async def run():
        ranks = FakeRanks()
        ranks.errors["create"] = UserInputError("no memory", where="x")
        async with running(tmp_path, ranks) as service:
            session_id = session(service)
            model_id = MODEL.format(session_id)
            with service._changed:  # both wait before the first is carried out
                created = create(service, session_id)
                waiting = step(service, model_id, 1)
            assert "no memory" in (await result(service, created))["error"]
            service._drop_old()
            assert "could not be created" in (await result(service, waiting))["error"]

    asyncio.run(run())


def test_sessions_and_models_count_and_are_forgotten(tmp_path):
    """A client that only creates and unloads models cannot fill the disk."""

    async def run():
        async with running(tmp_path, FakeRanks(), disk_bytes=10_000) as service:
            session_id = session(service)
            before = service.store.used_bytes("a")
            await result(service, create(service, session_id))
            await result(service, unload(service, MODEL.format(session_id)))
            assert service.store.used_bytes("a") > before + 3 * 256
            await result(service, create(service, session_id, 1))
            service.finish("a", session_id, {"finished": True})
            await result(service, unload(service, f"{session_id}:train:1"))
            service.store.drop_sessions(1e12)
            tables = ("sessions", "models", "requests", "samplers")
            assert [service.store.row(f"SELECT count(*) AS n FROM {each}")["n"] for each in tables] == [0, 0, 0, 0]
            assert service.store.used_bytes("a") == 0

    asyncio.run(run())


def test_a_session_with_a_checkpoint_is_not_forgotten(tmp_path):
    async def run():
        async with running(tmp_path, SavingRanks()) as service:
            session_id = session(service)
            await result(service, create(service, session_id))
            await result(service, save(service, MODEL.format(session_id), 1, "one"))
            service.finish("a", session_id, {"finished": True})
            await result(service, unload(service, MODEL.format(session_id)))
            service.store.drop_sessions(1e12)
            assert service.model("a", MODEL.format(session_id))["unloaded"] == 1

    asyncio.run(run())


def test_run_folders_of_unloaded_models_are_bounded(tmp_path):
    async def run():
        async with running(tmp_path, FakeRanks(), ended_models=2) as service:
            session_id = session(service)
            for seq in range(4):
                await result(service, create(service, session_id, seq))
            for seq in range(3):
                await result(service, unload(service, f"{session_id}:train:{seq}"))
            names = sorted(each.name[-1] for each in (tmp_path / "runs").iterdir())
            assert names == ["1", "2", "3"]

    asyncio.run(run())


def test_old_results_are_dropped_and_reported(tmp_path):
    async def run():
        async with running(tmp_path, FakeRanks()) as service:
            session_id = session(service)
            created = create(service, session_id)
            await result(service, created)
            service.store.drop_results(1e12)
            with pytest.raises(Refused, match="is not stored any more") as caught:
                await service.result("a", created, 1)
            assert caught.value.status == 410

    asyncio.run(run())
