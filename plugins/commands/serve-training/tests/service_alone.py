"""The service without a model: ranks that only record calls, and requests as the routes pass them."""

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

from tinker import types

from rlhf_serve_training.executor import Executor
from rlhf_serve_training.limits import Limits
from rlhf_serve_training.requests import ModelFacts
from rlhf_serve_training.service import Service
from rlhf_serve_training.store import Store

MODEL = "{}:train:0"


class FakeRanks:
    """Ranks that record calls. `errors`: method -> what it raises."""

    def __init__(self):
        options = SimpleNamespace(strategy="single", max_rank=8, is_owning=False)
        self.worker = SimpleNamespace(options=options)
        self.calls, self.errors = [], {}

    def call(self, method, **arguments):
        self.calls.append((method, arguments))
        if method in self.errors:
            raise self.errors[method]
        return (1.0, 1) if method == "optim_step" else 1


@asynccontextmanager
async def running(folder, ranks, **limits):
    """A service whose thread runs, as after a start with this output folder."""
    store, bounds = Store(folder), Limits(**limits)
    executor = Executor(store, ranks, ModelFacts(32, 64, {2}, None), bounds, folder, 1)
    service = Service(
        store,
        executor,
        bounds,
        output=folder,
        base="base",
        names=frozenset({"base"}),
        max_rank=8,
        only_one=ranks.worker.options.is_owning,
        ping=lambda: None,
    )
    service.start()
    try:
        yield service
    finally:
        assert service.stop(10)
        store.close()
        assert service.failed is None


def session(service, key="key"):
    return service.create_session("a", types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0.38"), key)


def create(service, session_id, seq=0):
    body = {"session_id": session_id, "model_seq_id": seq, "base_model": "base", "lora_config": {"rank": 4}}
    request = types.CreateModelRequest.model_validate(body)
    return service.create_model("a", request, request.model_dump_json().encode())


def step(service, model_id, seq, **options):
    body = {"model_id": model_id, "seq_id": seq, "adam_params": options, "type": "optim_step"}
    return service.train("a", "optim_step", json.dumps(body).encode())


async def result(service, request_id):
    return json.loads((await service.result("a", request_id, 10))[1])
