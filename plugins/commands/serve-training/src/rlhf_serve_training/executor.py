"""Carries out turns of the queue on the ranks, and stores their results."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker import types

from rlhf_core.errors import DeadlineError, RlhfError

from .adapters import AdapterSpec
from .checkpoints import Checkpoints, folder_name
from .failures import fail, is_known
from .fair import SAMPLE, Turn
from .limits import Limits
from .losses import loss_of
from .ranks import Ranks
from .requests import ModelFacts, check_ids, check_name, new_spec, read
from .run_folders import RunFolders
from .sample_turns import SampleTurns
from .store import JSON_RESULT, PROTO_RESULT, Store, StoredRequest, as_dict, encoded
from .wire import InvalidRequest, forward_output, forward_request, parse_forward

logger = logging.getLogger("rlhf.serve_training")
_MAX_ATTEMPTS = 3
"""How often a request is begun. A server that ends while it carries out a request begins it again."""
_DEPTH = 3
"""Parts of a folder's path that identify it: model, kind and name, or `states`, model and number."""
_CHANGES = ("forward_backward", "optim_step")
"""Kinds of requests that are carried out again when a model is restored."""
_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


@dataclass(slots=True)
class _Progress:
    """Work on a model since its state was written."""

    seconds: float = 0.0
    num_bytes: int = 0
    step: StoredRequest | None = None
    """The last change, if it was an `optim_step`: then there are no gradients, so the state can be written."""


class Executor:
    """Carries out requests, one turn at a time, on one thread."""

    def __init__(
        self, store: Store, ranks: Ranks, facts: ModelFacts, limits: Limits, output: Path, max_adapters: int
    ) -> None:
        """Create the executor.

        Args:
            store: the journal.
            ranks: the ranks.
            facts: what requests are checked against.
            limits: limits of the service.
            output: the output folder.
            max_adapters: maximum number of adapters in memory. Others are restored from their states.
        """
        self._store, self._ranks, self._facts, self._limits = store, ranks, facts, limits
        self._output, self._max_adapters = output, max_adapters
        self.checkpoints = Checkpoints(store, ranks, limits, output)
        self._samples = SampleTurns(store, ranks, facts, limits, self.checkpoints)
        self._folders = RunFolders(output, ranks.worker.options.strategy, limits.ended_models)
        self._drop_remains()
        self._is_again = False
        """Whether requests are carried out again, whose results are known."""
        self._resident: OrderedDict[str, _Progress] = OrderedDict()
        self._actions: Mapping[str, Callable[[StoredRequest, bytes], Mapping[str, Any] | bytes]] = {
            "create_model": self._create_model,
            "load_model": self._load_model,
            "forward": self._forward,
            "forward_backward": self._forward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
            "unload_model": self._unload,
        }

    def _drop_remains(self) -> None:
        """Delete the folders that a killed server was writing or deleting. The journal does not have them."""
        rows = self._store.rows("SELECT state AS folder FROM models WHERE state IS NOT NULL AND unloaded=0")
        rows += self._store.rows("SELECT folder FROM checkpoints")
        known = {Path(row["folder"]).parts[-_DEPTH:] for row in rows}
        for pattern in ("states/*/*", "checkpoints/*/*/*"):
            for folder in self._output.glob(pattern):
                if folder.parts[-_DEPTH:] not in known:
                    shutil.rmtree(folder, ignore_errors=True)

    def run(self, turn: Turn) -> list[str]:
        """Carry out a turn and return the ids of its finished requests."""
        if turn.kind == SAMPLE:
            new = [each for each in turn.requests if not self._store.attempts(each.id)]
            again = [each for each in turn.requests if each not in new]  # one of them may have ended the server
            for group in [*([each] for each in again), new]:
                if begun := [each for each in group if self._begins(each)]:
                    self._samples.run(begun)
        else:
            for request in turn.requests:
                if self._begins(request):
                    self._run_one(request)
        return [each.id for each in turn.requests]

    def _begins(self, request: StoredRequest) -> bool:
        if self._store.begin(request.id) <= _MAX_ATTEMPTS:
            return True
        text = f"the server ended {_MAX_ATTEMPTS} times during this request, so it is not carried out again"
        fail(self._store, request, InvalidRequest(text))
        return False

    def _run_one(self, request: StoredRequest) -> None:
        body = self._store.body(request.id) or b""
        begun = time.monotonic()
        try:
            result = self._actions[request.kind](request, body)
            if request.kind in ("load_weights", "load_model"):  # not done again, so its state is written first
                self._write_state(request)
        except DeadlineError:
            raise  # the request stays queued for the next server
        except Exception as error:
            if not is_known(error) or request.kind == "load_weights":
                self._resident.pop(request.owner, None)  # it may have changed, so it is restored before the next use
            keep = is_known(error) and request.kind == "optim_step"
            fail(self._store, request, error, keep_body=keep)
            return
        kind, result = (PROTO_RESULT, result) if isinstance(result, bytes) else (JSON_RESULT, encoded(result))
        progress = self._resident.get(request.owner)
        if progress is not None:
            progress.seconds += time.monotonic() - begun
            progress.num_bytes += len(body)
            if request.kind in _CHANGES:
                progress.step = request if request.kind == "optim_step" else None
        with self._store.transaction():
            self._store.finish(request.id, result, kind, keep_body=request.kind in _CHANGES)
            self._store.change("UPDATE models SET used=? WHERE id=?", time.time(), request.owner)
        if progress is not None and progress.step is request and self._is_due(progress):
            self._try_write_state(request)

    # Models

    def _create_model(self, request: StoredRequest, body: bytes) -> Mapping[str, Any]:
        message = read(types.CreateModelRequest, body)
        spec = new_spec(message, self._ranks.worker.options.max_rank)
        model_id = model_id_of(message.session_id, message.model_seq_id)
        self._make_room()
        self._ranks.call("create", name=model_id, spec=spec)
        self._resident[model_id] = _Progress()
        self._begin(model_id, request.tenant)
        return types.CreateModelResponse(model_id=model_id).model_dump()

    def _load_model(self, request: StoredRequest, body: bytes) -> Mapping[str, Any]:
        message = read(types.LoadWeightsRequest, body)
        assert message.session_id is not None and message.model_seq_id is not None
        model_id = model_id_of(message.session_id, message.model_seq_id)
        folder = self.checkpoints.folder(request.tenant, message.path)
        self._make_room()
        self._ranks.call("load", name=model_id, folder=str(folder), with_optimizer=message.optimizer)
        self._resident[model_id] = _Progress()
        self._begin(model_id, request.tenant)
        return {"path": message.path, "model_id": model_id, "type": "load_weights"}

    def _begin(self, model_id: str, tenant: str) -> None:
        row = self._store.row("SELECT about FROM models WHERE id=?", model_id)
        self._folders.begin(model_id, as_dict(row["about"] if row else None), tenant)

    def _make_room(self) -> None:
        """Drop the adapter that was used the longest ago, if memory is full. It can be restored."""
        while len(self._resident) >= self._max_adapters:
            name, progress = next(iter(self._resident.items()))
            if progress.step is not None:  # restoring it would delay other tenants otherwise
                self._try_write_state(progress.step)
            del self._resident[name]
            self._ranks.call("unload", name=name)

    def _restore(self, model_id: str) -> None:
        """Bring a model into memory: its last state, and the requests after it again."""
        if model_id in self._resident:
            self._resident.move_to_end(model_id)
            return
        row = self._store.row("SELECT * FROM models WHERE id=?", model_id)
        if row is None:
            raise InvalidRequest(f"the model {model_id} does not exist")
        self._make_room()
        if row["state"] is not None:
            self._ranks.call("load", name=model_id, folder=row["state"], with_optimizer=True)
        else:
            about = as_dict(row["about"])
            self._ranks.call("create", name=model_id, spec=AdapterSpec(**about["spec"]))
        self._resident[model_id] = _Progress()
        changing = "kind='forward_backward' AND status='done' OR kind='optim_step' AND status!='queued'"
        again = self._store.requests(f"owner=? AND seq>? AND ({changing})", model_id, row["applied"])
        self._is_again = True
        begun = time.monotonic()
        try:
            for request in again:
                body = self._store.body(request.id)
                if body is None and request.status == "failed":
                    continue  # an unforeseen error ended this step, so it was not made
                if body is None:
                    raise InvalidRequest(f"the request {request.id} is lost, load a checkpoint")
                self._do_again(request, body)
        except BaseException:
            self._resident.pop(model_id, None)  # its state is incomplete
            raise
        finally:
            self._is_again = False
        self._folders.resume(model_id)
        if again:
            progress = self._resident[model_id]
            progress.seconds = time.monotonic() - begun
            progress.step = again[-1] if again[-1].kind == "optim_step" and again[-1].status == "done" else None
            logger.warning("%s: %d requests since its last state were computed again", model_id, len(again))

    def _do_again(self, request: StoredRequest, body: bytes) -> None:
        try:
            self._actions[request.kind](request, body)
        except (InvalidRequest, RlhfError):
            if request.status == "done":
                raise  # a failed step failed before, too, and dropped its gradients

    def _is_due(self, progress: _Progress) -> bool:
        return progress.seconds >= self._limits.state_seconds or progress.num_bytes >= self._limits.state_bytes

    def _try_write_state(self, step: StoredRequest) -> None:
        try:
            self._write_state(step)
        except DeadlineError:
            raise
        except Exception as error:  # the requests since the last state are still stored
            logger.warning("the state of %s cannot be written: %s", step.owner, error)

    def _write_state(self, request: StoredRequest) -> None:
        """Write the state of a model without gradients, from which a restart continues."""
        model_id = model_of(request)
        seq = request.seq if request.kind != "load_model" else 0
        folder = self._output / "states" / folder_name(model_id) / str(seq)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            steps = self._ranks.call("save_state", name=model_id, folder=str(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        old = self._store.row("SELECT state FROM models WHERE id=?", model_id)
        with self._store.transaction():
            self._store.change(
                "UPDATE models SET state=?, applied=?, steps=? WHERE id=?", str(folder), seq, steps, model_id
            )
            self._store.drop_bodies(model_id, seq)
        self._resident[model_id] = _Progress()
        if old is not None and old["state"] not in (None, str(folder)):
            shutil.rmtree(old["state"], ignore_errors=True)

    def _unload(self, request: StoredRequest, body: bytes) -> Mapping[str, Any]:
        message = read(types.UnloadModelRequest, body)
        self._resident.pop(message.model_id, None)
        self._ranks.call("unload", name=message.model_id)
        self._folders.end(message.model_id)
        self._store.drop_bodies(message.model_id, 2**31)
        shutil.rmtree(self._output / "states" / folder_name(message.model_id), ignore_errors=True)
        return {"model_id": message.model_id, "type": "unload_model"}

    # Training

    def _forward(self, request: StoredRequest, body: bytes) -> bytes:
        self._restore(request.owner)
        message = parse_forward(body)
        if len(message.data) > self._limits.data_per_request:
            allowed = self._limits.data_per_request
            raise InvalidRequest(f"the request has {len(message.data)} data, the limit is {allowed}: send several")
        order = forward_request(message)
        num_tokens = sum(row.num_tokens for row in order.rows)
        if num_tokens > self._limits.request_tokens:
            allowed = self._limits.request_tokens
            raise InvalidRequest(
                f"the data have {num_tokens} tokens, the limit of a request is {allowed}: send several"
            )
        loss_of(order.loss, order.config, order.rows)
        limit = self._facts.context_tokens
        for index, row in enumerate(order.rows):
            if limit is not None and row.num_tokens > limit:
                raise InvalidRequest(f"datum {index} has {row.num_tokens} tokens, the model's context {limit}")
            targets = row.fields["target_tokens"]
            check_ids(int(row.token_ids.min()), int(row.token_ids.max()), self._facts)
            check_ids(int(targets.min()), int(targets.max()), self._facts)
        begun, options = time.monotonic(), {"loss": order.loss, "config": dict(order.config)}
        backward = not order.forward_only
        try:
            rows, metrics = self._ranks.call(
                "forward", name=request.owner, rows=order.rows, backward=backward, **options
            )
        except Exception:
            if self._ranks.worker.options.is_owning:
                self._resident.pop(request.owner, None)  # earlier gradients are lost, too
            raise
        if not (order.forward_only or self._is_again):
            self._folders.forward(request.owner, metrics["loss:sum"], time.monotonic() - begun)
        return forward_output(rows, metrics)

    def _optim_step(self, request: StoredRequest, body: bytes) -> Mapping[str, Any]:
        self._restore(request.owner)
        params = read(types.OptimStepRequest, body).optim_params
        if not isinstance(params, types.AdamParams):
            raise InvalidRequest(f"the optimizer {params.type!r} is not offered, only Adam")
        options = {name: float(getattr(params, name)) for name in _ADAM}
        if not all(math.isfinite(value) and value >= 0 for value in options.values()):
            raise InvalidRequest("the options of Adam are finite and not negative")
        if not (options["beta1"] < 1 and options["beta2"] < 1):
            raise InvalidRequest("beta1 and beta2 are below 1")
        begun = time.monotonic()
        norm, step = self._ranks.call("optim_step", name=request.owner, options=options)
        if not self._is_again:
            self._folders.step(request.owner, step, norm, time.monotonic() - begun)
        return {"metrics": {"grad_norm:max": norm}}

    # Checkpoints

    def _save_weights(self, request: StoredRequest, body: bytes) -> Mapping[str, Any]:
        message = read(types.SaveWeightsRequest, body)
        name = check_name(message.path or f"seq-{request.seq}")
        self._restore(request.owner)
        path = self.checkpoints.save(request, "training", name, message, overwrite=message.overwrite)
        return {"path": path, "type": "save_weights"}

    def _save_external(self, request: StoredRequest, body: bytes) -> Mapping[str, Any]:
        message = read(types.SaveWeightsExternalRequest, body)
        if message.age_encryption_recipients:
            raise InvalidRequest("age_encryption_recipients is not offered")
        self._restore(request.owner)
        path = self.checkpoints.save(request, "external", check_name(message.path), message, overwrite=False)
        row = self._store.row("SELECT bytes FROM checkpoints WHERE path=?", path)
        return {"path": path, "size_bytes": row["bytes"] if row else None, "type": "save_weights_external"}

    def _save_for_sampler(self, request: StoredRequest, body: bytes) -> Mapping[str, Any]:
        message = read(types.SaveWeightsForSamplerRequest, body)
        self._restore(request.owner)
        if message.path is not None:
            path = self.checkpoints.save(request, "sampler", check_name(message.path), message, overwrite=False)
            return {"path": path, "type": "save_weights_for_sampler"}
        if message.sampling_session_seq_id is None:
            raise InvalidRequest("path or sampling_session_seq_id is needed")
        name = "inflight" if message.kind == "inflight" else f"unnamed-{request.seq}"
        path = self.checkpoints.save(request, "sampler", name, message, overwrite=True)
        session_id = request.owner.rpartition(":train:")[0]
        sampler_id = f"{session_id}:sample:{message.sampling_session_seq_id}"
        model = self._store.row("SELECT about FROM models WHERE id=?", request.owner)
        base = as_dict(model["about"] if model else None).get("base", "")
        self._store.change(
            "INSERT OR IGNORE INTO samplers VALUES(?,?,?,?,?,?)",
            *(sampler_id, request.tenant, session_id, path, base, time.time()),
        )
        self.checkpoints.drop_unnamed(request.owner)
        return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

    def _load_weights(self, request: StoredRequest, body: bytes) -> Mapping[str, Any]:
        message = read(types.LoadWeightsRequest, body)
        folder = self.checkpoints.folder(request.tenant, message.path)
        self._restore(request.owner)
        self._ranks.call("load", name=request.owner, folder=str(folder), with_optimizer=message.optimizer)
        return {"path": message.path, "model_id": request.owner, "type": "load_weights"}


def model_id_of(session_id: str, seq: int) -> str:
    """Return the id of a session's model, as the SDK derives it."""
    return f"{session_id}:train:{seq}"


def model_of(request: StoredRequest) -> str:
    """Return the model that a finished request changed."""
    return model_id_of(request.owner, request.seq) if request.kind == "load_model" else request.owner
