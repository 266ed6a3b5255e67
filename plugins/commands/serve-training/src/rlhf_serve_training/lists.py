"""Answers about models, sessions and checkpoints, and the files of an exported adapter."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from rlhf_core.errors import CheckpointError
from rlhf_web import Refused

from .adapters import read_spec
from .checkpoints import SEGMENTS
from .requests import ModelFacts
from .service import Service
from .store import as_dict, encoded, ids_of

_URL_SECONDS = 3600.0
_KINDS = {segment: kind for kind, segment in SEGMENTS.items()}


class Lists:
    """Handlers that change nothing, except for the lifetime of checkpoints."""

    def __init__(self, service: Service, facts: ModelFacts, tokenizer: str) -> None:
        """Create the handlers.

        Args:
            service: the service.
            facts: facts of the base model.
            tokenizer: name or folder that a client loads the tokenizer from.
        """
        self._service, self._facts, self._tokenizer = service, facts, tokenizer
        self._secret = secrets.token_bytes(32)

    async def capabilities(self, request: Request, tenant: str) -> Response:
        """The base model."""
        model = {
            "model_name": self._service.base,
            "max_context_length": self._facts.context_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return _json({"supported_models": [model]})

    def info(self, tenant: str, model_id: str) -> dict[str, Any]:
        """Return a `GetInfoResponse`."""
        model = self._service.model(tenant, model_id)
        data = {"model_name": self._service.base, "tokenizer_id": self._tokenizer}
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": data,
            "is_lora": True,
            "lora_rank": model["spec"]["rank"],
            "model_name": self._service.base,
        }

    def weights_info(self, tenant: str, body: bytes) -> dict[str, Any]:
        """Return a `WeightsInfoResponse`. Raises `Refused`."""
        try:
            path = json.loads(body)["tinker_path"]
            spec, _ = read_spec(self._service.checkpoint_folder(tenant, str(path)))
        except (ValueError, KeyError, TypeError, CheckpointError):
            raise Refused(404, "not_found", "the checkpoint does not exist") from None
        return {
            "base_model": self._service.base,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": False,
            "train_mlp": spec.mlp,
            "train_attn": spec.attention,
        }

    async def sessions(self, request: Request, tenant: str) -> Response:
        """The sessions of a tenant, newest first."""
        limit, offset = _page(request)
        query = "SELECT id FROM sessions WHERE tenant=? ORDER BY created DESC LIMIT ? OFFSET ?"
        return _json({"sessions": ids_of(self._service.store.rows(query, tenant, limit, offset))})

    async def session(self, request: Request, tenant: str) -> Response:
        """A session with its models and samplers."""
        store, session_id = self._service.store, request.path_params["id"]
        row = store.row("SELECT about FROM sessions WHERE id=? AND tenant=?", session_id, tenant)
        if row is None:
            raise Refused(404, "not_found", f"the session {session_id} does not exist")
        about = as_dict(row["about"])
        return _json(
            {
                "training_run_ids": ids_of(store.rows("SELECT id FROM models WHERE session=?", session_id)),
                "sampler_ids": ids_of(store.rows("SELECT id FROM samplers WHERE session=?", session_id)),
                "user_metadata": about.get("user_metadata"),
                "display_name": about.get("display_name"),
            }
        )

    def sampler_of(self, tenant: str, sampler_id: str) -> Mapping[str, Any]:
        """Return a sampling session. Raises `Refused`."""
        row = self._service.store.row("SELECT * FROM samplers WHERE id=? AND tenant=?", sampler_id, tenant)
        if row is None:
            raise Refused(404, "not_found", f"the sampling session {sampler_id} does not exist")
        return dict(row)

    async def sampler(self, request: Request, tenant: str) -> Response:
        """A sampling session."""
        row = self.sampler_of(tenant, request.path_params["id"])
        return _json({"sampler_id": row["id"], "base_model": row["base"], "model_path": row["model_path"]})

    async def runs(self, request: Request, tenant: str) -> Response:
        """The models of a tenant, newest first."""
        limit, offset = _page(request)
        store = self._service.store
        query = "SELECT * FROM models WHERE tenant=? ORDER BY created DESC LIMIT ? OFFSET ?"
        rows = store.rows(query, tenant, limit, offset)
        total = store.row("SELECT count(*) AS n FROM models WHERE tenant=?", tenant)
        cursor = {"offset": offset, "limit": limit, "total_count": total["n"] if total else 0}
        return _json({"training_runs": [self._run(dict(row)) for row in rows], "cursor": cursor})

    async def run(self, request: Request, tenant: str) -> Response:
        """A model."""
        return _json(self._run(self._service.model(tenant, request.path_params["id"])))

    def _run(self, row: Mapping[str, Any]) -> dict[str, Any]:
        about = as_dict(row["about"])
        last = {kind: self._newest(row["id"], kind) for kind in ("training", "sampler")}
        return {
            "training_run_id": row["id"],
            "base_model": self._service.base,
            "model_owner": row["tenant"],
            "is_lora": True,
            "lora_rank": about["spec"]["rank"],
            "last_request_time": _time(row["used"]),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": about.get("user_metadata"),
        }

    def _newest(self, model_id: str, kind: str) -> dict[str, Any] | None:
        query = "SELECT * FROM checkpoints WHERE model=? AND kind=? ORDER BY created DESC LIMIT 1"
        row = self._service.store.row(query, model_id, kind)
        return None if row is None else _checkpoint(dict(row))

    async def run_checkpoints(self, request: Request, tenant: str) -> Response:
        """The checkpoints of a model."""
        self._service.model(tenant, request.path_params["id"])
        query = "SELECT * FROM checkpoints WHERE model=? ORDER BY created"
        rows = self._service.store.rows(query, request.path_params["id"])
        return _json({"checkpoints": [_checkpoint(dict(row)) for row in rows]})

    async def checkpoints(self, request: Request, tenant: str) -> Response:
        """The checkpoints of a tenant, newest first."""
        limit, offset = _page(request)
        store = self._service.store
        query = "SELECT * FROM checkpoints WHERE tenant=? ORDER BY created DESC LIMIT ? OFFSET ?"
        rows = store.rows(query, tenant, limit, offset)
        total = store.row("SELECT count(*) AS n FROM checkpoints WHERE tenant=?", tenant)
        cursor = {"offset": offset, "limit": limit, "total_count": total["n"] if total else 0}
        return _json({"checkpoints": [_checkpoint(dict(row)) for row in rows], "cursor": cursor})

    async def delete(self, request: Request, tenant: str) -> Response:
        """Delete a checkpoint."""
        self._service.delete_checkpoint(tenant, _path(request))
        return _json({})

    def set_ttl(self, request: Request, tenant: str, body: bytes) -> Response:
        """Set the lifetime of a checkpoint."""
        try:
            ttl = json.loads(body).get("ttl_seconds")
            expires = None if ttl is None else time.time() + float(ttl)
            _time(expires or 0.0)
        except (ValueError, TypeError, AttributeError, OverflowError, OSError):
            raise Refused(400, "invalid_request", "ttl_seconds is a number or null") from None
        query = "UPDATE checkpoints SET expires=? WHERE path=? AND tenant=?"
        if not self._service.store.change(query, expires, _path(request), tenant):
            raise Refused(404, "not_found", f"the checkpoint {_path(request)} does not exist")
        return _json({})

    async def urls(self, request: Request, tenant: str) -> Response:
        """An address for each file of an exported adapter, which needs no key for an hour."""
        path = _path(request)
        if request.path_params["kind"] != SEGMENTS["external"]:
            raise Refused(400, "invalid_request", "only exported adapters are downloaded: save_weights_external")
        folder = self._service.checkpoint_folder(tenant, path)
        expires = time.time() + _URL_SECONDS
        text = f"{int(expires)}|{folder.relative_to(self._service.output)}"
        token = f"{self._signature(text)}-{text.encode().hex()}"
        base = f"{request.url.scheme}://{request.url.netloc}/files/{token}"
        files = sorted(each.name for each in folder.iterdir())
        return _json({"urls": {name: f"{base}/{name}" for name in files}, "expires": _time(expires)})

    async def file(self, request: Request) -> Response:
        """A file of an exported adapter, by its signed address."""
        signature, _, text = request.path_params["token"].partition("-")
        try:
            content = bytes.fromhex(text).decode()
        except ValueError:
            content = ""
        is_valid = hmac.compare_digest(signature.encode(), self._signature(content).encode())
        expires, _, folder = content.partition("|")
        if not is_valid or float(expires) < time.time():
            raise Refused(403, "forbidden", "the address has expired or is wrong")
        path = self._service.output / folder / Path(request.path_params["file"]).name
        if not path.is_file():
            raise Refused(404, "not_found", "the file does not exist")
        return FileResponse(path)

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


def _json(value: Mapping[str, Any]) -> Response:
    return Response(encoded(value), media_type="application/json")


def _path(request: Request) -> str:
    values = request.path_params
    if values["kind"] not in _KINDS:
        raise Refused(404, "not_found", "the checkpoint does not exist")
    return f"tinker://{values['id']}/{values['kind']}/{values['name']}"


def _page(request: Request) -> tuple[int, int]:
    try:
        limit, offset = (int(request.query_params.get(name, value)) for name, value in (("limit", 20), ("offset", 0)))
    except ValueError:
        raise Refused(400, "invalid_request", "limit and offset are integers") from None
    return min(max(limit, 0), 1000), max(offset, 0)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{SEGMENTS[row['kind']]}/{row['name']}",
        "checkpoint_type": row["kind"],
        "time": _time(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["bytes"],
        "user_metadata": as_dict(row["about"]) or None,
        "expires_at": None if row["expires"] is None else _time(row["expires"]),
    }
