"""The service: accepts requests, queues them, and returns their results."""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinker import types

from rlhf_web import Refused

from .adapters import read_spec
from .disk_use import DiskUse
from .executor import Executor, model_id_of
from .fair import SAMPLE, TRAIN, FairQueue
from .limits import Limits
from .requests import TRAINING_KINDS, new_spec, num_samples, read
from .results import Results
from .store import JSON_RESULT, Store, StoredRequest, as_dict, encoded, failure
from .wire import InvalidRequest, parse_forward

logger = logging.getLogger("rlhf.serve_training")
CREATE = "create"
_IDLE_SECONDS = 20.0
"""Interval of the calls that keep idle ranks from timing out."""
_CLEANING_SECONDS = 60.0


class Service:
    """State of the service. Methods are called by the event loop, except for the thread that carries out requests."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        limits: Limits,
        *,
        output: Path,
        base: str,
        names: frozenset[str],
        max_rank: int,
        only_one: bool,
        ping: Callable[[], None],
    ) -> None:
        """Create the service and queue the requests that a killed server left.

        Args:
            store: the journal.
            executor: carries out requests.
            limits: limits for each tenant.
            output: the output folder.
            base: name of the base model.
            names: names of the base model that clients may use.
            max_rank: largest rank of an adapter.
            only_one: whether the strategy holds one adapter, of all tenants.
            ping: called while idle.
        """
        self.store, self.executor, self.limits = store, executor, limits
        self.base, self.names, self.max_rank = base, names, max_rank
        self.output, self._only_one = output, only_one
        self.checkpoints = executor.checkpoints
        self._ping = ping
        self._changed = threading.Condition()
        self._queue = FairQueue(self._num_samples, max_batch=limits.rows_per_turn)
        self._results = Results(store)
        self._disk = DiskUse(store, limits)
        self._is_stopping = False
        self._next_cleaning = 0.0
        self.failed: BaseException | None = None
        self._recover()
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)

    def start(self) -> None:
        """Start the thread that carries out requests. Called on the event loop."""
        self._results.start()
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """End the thread after its current turn. Returns whether it ended in time."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _recover(self) -> None:
        created = "SELECT id FROM requests WHERE kind IN ('create_model', 'load_model') AND status='done'"
        query = f"SELECT id, tenant, applied FROM models WHERE unloaded=0 AND id IN ({created})"
        for row in self.store.rows(query):
            last = self.store.row("SELECT max(seq) AS seq FROM requests WHERE owner=? AND status!='queued'", row["id"])
            done = 0 if last is None or last["seq"] is None else int(last["seq"])
            self._queue.begin(row["tenant"], row["id"], max(done, row["applied"]) + 1)
        left = self.store.requests("status='queued'")
        for request in left:
            self._enqueue(request)
        failed = "SELECT id FROM requests WHERE kind IN ('create_model', 'load_model') AND status='failed'"
        for row in self.store.rows(f"SELECT id, tenant FROM models WHERE id IN ({failed})"):
            self._drop_model(row["tenant"], row["id"])
        if left:
            logger.warning("%d requests of the server before this one are carried out now", len(left))

    # The thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    turn = self._queue.take()
                    if turn is None and not self._is_stopping:
                        self._changed.wait(_IDLE_SECONDS)
                        turn = self._queue.take()
                    if self._is_stopping:
                        return
                if time.monotonic() > self._next_cleaning:
                    self._drop_old()
                    self._next_cleaning = time.monotonic() + _CLEANING_SECONDS
                if turn is None:
                    self._ping()
                    continue
                finished = self.executor.run(turn)
                for request in turn.requests:
                    self._opened(request)
                self._results.notify(finished)
        except BaseException as error:  # a rank is lost: nothing can be carried out any more
            logger.exception("the service cannot continue")
            self.failed = error

    def _opened(self, request: StoredRequest) -> None:
        """Open the lane of a model that was just created, or close the one of a model that could not be."""
        if request.kind not in ("create_model", "load_model"):
            return
        model_id = model_id_of(request.owner, request.seq)
        row = self.store.row("SELECT status FROM requests WHERE id=?", request.id)
        with self._changed:
            if row is not None and row["status"] == "done":
                self._queue.begin(request.tenant, model_id, 1)
                return
            self._drop_model(request.tenant, model_id)

    def _drop_model(self, tenant: str, model_id: str) -> None:
        self.store.change("DELETE FROM models WHERE id=?", model_id)
        self._fail_waiting(tenant, model_id, "the model could not be created")

    def _fail_waiting(self, tenant: str, model_id: str, reason: str) -> None:
        """Close a model's lane. The requests that wait in it fail. Called with the lock."""
        for each in self._queue.end(tenant, model_id):
            self._fail(each, reason)

    def _fail(self, request: StoredRequest, reason: str) -> None:
        self.store.finish(request.id, failure(reason, "user"), JSON_RESULT, failed=True)
        self._results.notify([request.id])

    def _drop_old(self) -> None:
        """Drop old results and expired checkpoints, and finish sessions without a client."""
        now = time.time()
        query = "SELECT id, tenant FROM sessions WHERE finished IS NULL AND seen<?"
        for row in self.store.rows(query, now - self.limits.session_seconds):
            self.finish(row["tenant"], row["id"], {"abandoned": True})
        with self._changed:
            given_up = self._queue.give_up(time.monotonic(), self.limits.order_seconds)
        for request, missing in given_up:
            self._fail(request, f"the request {missing} of this model did not arrive in time")
        self.store.drop_results(now - self.limits.result_seconds)
        self.store.drop_sessions(now - self.limits.session_seconds)
        for row in self.store.rows("SELECT path, folder FROM checkpoints WHERE expires<?", now):
            self.store.change("DELETE FROM checkpoints WHERE path=?", row["path"])
            shutil.rmtree(row["folder"], ignore_errors=True)

    def _num_samples(self, request: StoredRequest) -> int:
        is_sample = request.kind == "asample"
        return num_samples(self.store.body(request.id) or b"{}") if is_sample else self.limits.rows_per_turn

    # Requests

    def _accept(self, tenant: str, owner: str, seq: int, kind: str, body: bytes) -> str:
        """Store and queue a request, unless its id exists, and return the id. Raises `Refused`."""
        prefix = {"create_model": "train", "load_model": "train", "asample": ""}.get(kind)
        request_id = f"{owner}:{seq}" if prefix is None else f"{owner}:{prefix or 'request'}:{seq}"
        known = self.store.row("SELECT kind FROM requests WHERE id=?", request_id)
        if known is not None:
            if known["kind"] != kind:
                raise Refused(400, "conflict", f"the number {seq} was used for a request of the kind {known['kind']}")
            return request_id
        with self._changed:
            if kind != "unload_model":  # it is outside of the order, and frees memory and disk
                if self._queue.is_late(tenant, owner, seq):
                    raise Refused(400, "late", f"the request {seq} is too late: later ones of this model were finished")
                self._check_room(tenant, owner, seq, len(body))
            request = StoredRequest(request_id, tenant, owner, seq, kind, "queued", len(body))
            if self.store.add_request(request, body):
                self._enqueue(request)
                self._changed.notify_all()
        return request_id

    def _check_room(self, tenant: str, owner: str, seq: int, size: int) -> None:
        """Raise `Refused` if a request of `size` bytes is beyond the tenant's limits."""
        count, num_bytes = self._queue.load(tenant)
        limits, is_next = self.limits, self._queue.has_room_for(tenant, owner, seq)
        if not is_next and (count >= limits.queued_requests or num_bytes + size > limits.queued_bytes):
            raise Refused(429, "queue_full", f"{count} requests wait, wait for some of them")
        self._disk.check(tenant, size)

    def _enqueue(self, request: StoredRequest) -> None:
        if request.kind in ("create_model", "load_model", "unload_model"):
            self._queue.add(request, f"{CREATE}:{request.owner}", CREATE)
        elif request.kind == "asample":
            row = self.store.row("SELECT model_path FROM samplers WHERE id=?", request.owner)
            path = None if row is None else row["model_path"]
            self._queue.add(request, f"{SAMPLE}:{path}", SAMPLE)
        else:
            self._queue.add(request, request.owner, TRAIN)

    def create_session(self, tenant: str, request: types.CreateSessionRequest, idempotency_key: str) -> str:
        """Return the id of a new session, or of the one with the same idempotency key. Raises `Refused`."""
        self._disk.check_session(tenant)
        digest = hashlib.sha256(f"{tenant}\0{idempotency_key}".encode()).hexdigest()[:32]
        session_id = f"session-{digest}"
        about = {"display_name": request.display_name, "user_metadata": request.user_metadata, "tags": request.tags}
        now = time.time()
        self.store.change(
            "INSERT OR IGNORE INTO sessions VALUES(?,?,?,?,?,?)",
            *(session_id, tenant, now, now, None, encoded(about).decode()),
        )
        return session_id

    def seen(self, tenant: str, session_id: str) -> None:
        """Note a session's heartbeat. Raises `Refused` if it is unknown or finished."""
        self.session(tenant, session_id, 410)  # which ends the heartbeat of the SDK
        self.store.change("UPDATE sessions SET seen=? WHERE id=?", time.time(), session_id)

    def session(self, tenant: str, session_id: str, status: int = 400) -> Mapping[str, Any]:
        """Return a session of a tenant. Raises `Refused` if it is unknown, or with `status` if it is finished."""
        row = self.store.row("SELECT * FROM sessions WHERE id=? AND tenant=?", session_id, tenant)
        if row is None:
            raise Refused(404, "not_found", f"the session {session_id} does not exist")
        if row["finished"] is not None:
            raise Refused(status, "finished", f"the session {session_id} is finished")
        return dict(row)

    def model(self, tenant: str, model_id: str) -> dict[str, Any]:
        """Return a tenant's model with `about`. Raises `Refused` if it is unknown."""
        row = self.store.row("SELECT * FROM models WHERE id=? AND tenant=?", model_id, tenant)
        if row is None:
            raise Refused(404, "not_found", f"the model {model_id} does not exist")
        return {**dict(row), **as_dict(row["about"])}

    def create_model(self, tenant: str, request: types.CreateModelRequest, body: bytes) -> str:
        """Accept the creation of a model. Raises `Refused` or `InvalidRequest`."""
        self.session(tenant, request.session_id)
        self.check_base(request.base_model)
        spec = asdict(new_spec(request, self.max_rank))
        return self._create(tenant, request.session_id, request.model_seq_id, "create_model", spec, request, body)

    def load_weights(self, tenant: str, request: types.LoadWeightsRequest, body: bytes) -> str:
        """Accept the loading of a checkpoint, into a model or as a new one. Raises `Refused`."""
        if request.session_id is None:
            return self.train(tenant, "load_weights", body)
        self.session(tenant, request.session_id)
        if request.base_model is not None:
            self.check_base(request.base_model)
        if request.model_seq_id is None:
            raise Refused(400, "invalid_request", "model_seq_id is needed with session_id")
        spec, _ = read_spec(self.checkpoint_folder(tenant, request.path))
        return self._create(tenant, request.session_id, request.model_seq_id, "load_model", asdict(spec), request, body)

    def _create(
        self, tenant: str, session_id: str, seq: int, kind: str, spec: Mapping[str, Any], request: Any, body: bytes
    ) -> str:
        model_id = model_id_of(session_id, seq)  # also the id of the request
        if self.store.row("SELECT 1 FROM requests WHERE id=?", model_id) is not None:
            return self._accept(tenant, session_id, seq, kind, body)
        row = self.store.row("SELECT count(*) AS n FROM models WHERE tenant=? AND unloaded=0", tenant)
        if row is not None and row["n"] >= self.limits.models:
            raise Refused(400, "too_many_models", f"{row['n']} models exist, the limit: unload some of them")
        if self._only_one and self.store.row("SELECT 1 FROM models WHERE unloaded=0") is not None:
            raise Refused(400, "one_adapter", "the strategy of this server holds one adapter, and it is in use")
        about = encoded({"spec": spec, "base": self.base, "user_metadata": request.user_metadata}).decode()
        now = time.time()
        with self._changed, self.store.transaction():  # in this order, as on the thread
            self.store.change(
                "INSERT OR IGNORE INTO models(id, tenant, session, about, created, used) VALUES(?,?,?,?,?,?)",
                *(model_id, tenant, session_id, about, now, now),
            )
            return self._accept(tenant, session_id, seq, kind, body)

    def checkpoint_folder(self, tenant: str, path: str) -> Path:
        """Return the folder of a tenant's checkpoint. Raises `Refused` for those of others, and unknown ones."""
        try:
            return self.checkpoints.folder(tenant, path)
        except InvalidRequest as error:
            raise Refused(404, "not_found", str(error)) from None

    def check_base(self, name: str) -> None:
        """Raise `Refused` if a name is not one of the base model."""
        if name not in self.names:
            raise Refused(404, "not_found", f"the base model {name!r} does not exist: this server has {self.base!r}")

    def train(self, tenant: str, kind: str, body: bytes) -> str:
        """Accept a request for a model, of a kind in the order of the model's requests.

        Raises `Refused` or `InvalidRequest`.
        """
        if kind == "forward_backward":
            message: Any = parse_forward(body)
            kind = "forward" if message.forward_only else kind
        else:
            message = read(TRAINING_KINDS[kind], body)
        model = self.model(tenant, message.model_id or "")
        if model["unloaded"]:
            raise Refused(400, "unloaded", f"the model {message.model_id} is unloaded")
        if message.seq_id is None or not 1 <= message.seq_id < 2**31:
            raise Refused(400, "invalid_request", "seq_id is at least 1")
        return self._accept(tenant, message.model_id, message.seq_id, kind, body)

    def unload(self, tenant: str, request: types.UnloadModelRequest, body: bytes) -> str:
        """Accept the unloading of a model. Requests that still wait for it fail. Raises `Refused`."""
        self.model(tenant, request.model_id)
        with self._changed, self.store.transaction():
            self.store.change("UPDATE models SET unloaded=1 WHERE id=?", request.model_id)
            self._fail_waiting(tenant, request.model_id, "the model is unloaded")
            return self._accept(tenant, request.model_id, -1, "unload_model", body)

    def create_sampler(self, tenant: str, request: types.CreateSamplingSessionRequest) -> str:
        """Return the id of a sampling session. Raises `Refused`."""
        self.session(tenant, request.session_id)
        if request.model_path is not None:
            self.checkpoint_folder(tenant, request.model_path)
        elif request.base_model is None:
            raise Refused(400, "invalid_request", "base_model or model_path is needed")
        if request.base_model is not None:
            self.check_base(request.base_model)
        self._disk.check(tenant)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self.store.change(
            "INSERT OR IGNORE INTO samplers VALUES(?,?,?,?,?,?)",
            *(sampler_id, tenant, request.session_id, request.model_path, self.base, time.time()),
        )
        return sampler_id

    def sample(self, tenant: str, body: bytes) -> tuple[str, list[str]]:
        """Accept a request for samples. Returns its id and an id for each sample.

        Raises `Refused` or `InvalidRequest`.
        """
        request = read(types.SampleRequest, body)
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refused(400, "invalid_request", "sampling_session_id and seq_id are needed")
        owner = request.sampling_session_id
        if self.store.row("SELECT 1 FROM samplers WHERE id=? AND tenant=?", owner, tenant) is None:
            raise Refused(404, "not_found", f"the sampling session {owner} does not exist")
        count = min(max(request.num_samples, 1), self.limits.samples_per_request)
        request_id = self._accept(tenant, owner, request.seq_id, "asample", body)
        return request_id, [f"{request_id}:{index}" for index in range(count)]

    # Results

    async def result(self, tenant: str, request_id: str, seconds: float) -> tuple[str, bytes] | None:
        """Return the type and content of a result, or None if it is not finished in time. Raises `Refused`."""
        return await self._results.get(tenant, request_id, seconds)

    def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a request for samples that still waits. Others are left alone. Raises `Refused`."""
        if self.store.row("SELECT 1 FROM requests WHERE id=? AND tenant=?", request_id, tenant) is None:
            raise Refused(404, "not_found", f"the request {request_id} does not exist")
        with self._changed:
            removed = self._queue.remove(request_id)
        if removed is not None:
            self._fail(removed, "the request was canceled")

    def finish(self, tenant: str, session_id: str, reason: Mapping[str, Any]) -> None:
        """Finish a session. The first reason counts. Raises `Refused`."""
        row = self.store.row("SELECT 1 FROM sessions WHERE id=? AND tenant=?", session_id, tenant)
        if row is None:
            raise Refused(404, "not_found", f"the session {session_id} does not exist")
        text = encoded(reason).decode()
        self.store.change("UPDATE sessions SET finished=? WHERE id=? AND finished IS NULL", text, session_id)
        for each in self.store.rows("SELECT id FROM models WHERE session=? AND unloaded=0", session_id):
            request = types.UnloadModelRequest(model_id=each["id"])
            self.unload(tenant, request, request.model_dump_json().encode())

    def delete_checkpoint(self, tenant: str, path: str) -> None:
        """Delete a checkpoint. Raises `Refused`."""
        row = self.store.row("SELECT folder FROM checkpoints WHERE path=? AND tenant=?", path, tenant)
        if row is None:
            raise Refused(404, "not_found", f"the checkpoint {path} does not exist")
        self.store.change("DELETE FROM checkpoints WHERE path=?", path)
        shutil.rmtree(row["folder"], ignore_errors=True)
