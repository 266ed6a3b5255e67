"""The processes of the service: rank 0 has the HTTP server, the queue and the journal, and all ranks compute."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
from starlette.types import ASGIApp

from rlhf_core.distributed import read_launch_env
from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.util import write_json
from rlhf_models import call_in_ended_thread, eos_token_ids
from rlhf_strategies import stop_requested
from rlhf_web import environment_key, serve_until_stopped

from .app import Tenants, make_app, server_limits
from .executor import Executor
from .launchers import Launch
from .limits import Limits
from .options import WHERE, WorkerOptions
from .ranks import Ranks, follow
from .requests import ModelFacts
from .service import Service
from .store import Store
from .worker import Worker

_GRACE_SECONDS = 5.0
_TURN_SECONDS = 600.0
"""Maximum wait for the current turn at the end."""
logger = logging.getLogger("rlhf.serve_training")


@dataclass(frozen=True)
class ServeOptions:
    """Options of the service, as JSON values."""

    worker: Mapping[str, Any]
    """Options of `WorkerOptions`."""
    output: str
    host: str = "127.0.0.1"
    port: int = 8000
    tenants: Mapping[str, str] = field(default_factory=dict)
    """Name -> environment variable with the tenant's key."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Changed fields of `Limits`."""


def run(options: ServeOptions, num_processes: int, launch: Launch) -> None:
    """Serve until a signal arrives. Raises `UserInputError` for options that cannot be used.

    Args:
        options: options of the service.
        num_processes: number of ranks.
        launch: starts the ranks.
    """
    check_keys(options.tenants)
    with _own_folder(Path(options.output), str(options.worker["base"])):
        launch(f"{__name__}:{run_rank.__name__}", num_processes, [asdict(options)])


def check_keys(tenants: Mapping[str, str]) -> dict[str, str]:
    """Return the key of each tenant. Raises `UserInputError` if one is missing, invalid or used twice.

    Args:
        tenants: name -> environment variable.
    """
    keys: dict[str, str] = {}
    for name, variable in tenants.items():
        key = environment_key(variable, where=f"the key of the tenant {name}")
        if not key.startswith("tml-") or len(key) < 20:
            raise UserInputError(
                f"the key in {variable} must start with tml- and have at least 20 characters",
                where=f"the key of the tenant {name}",
                hint=f"export {variable}=tml-$(openssl rand -hex 24)",
            )
        if key in keys.values():
            raise UserInputError(f"{variable} has the key of another tenant", where=f"the key of the tenant {name}")
        keys[name] = key
    return keys


@contextmanager
def _own_folder(folder: Path, base: str) -> Iterator[None]:
    """Context in which this process owns the output folder. Raises `UserInputError` if another server does."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise UserInputError("another server uses it", where=str(folder), hint="choose another --output") from None
    try:
        about = folder / "service.json"
        if about.exists() and (found := json.loads(about.read_text())["base"]) != base:
            raise UserInputError(
                f"it has adapters of {found!r}, not of {base!r}", where=str(folder), hint="choose another --output"
            )
        if not about.exists():
            write_json(about, {"base": base})
        yield
    finally:
        os.close(handle)


def run_rank(request: Mapping[str, Any]) -> None:
    """Run this process's rank.

    Args:
        request: fields of `ServeOptions`.
    """
    options = ServeOptions(**request)
    make = partial(Worker, WorkerOptions(**options.worker))
    if read_launch_env().rank == 0:
        _serve(call_in_ended_thread(make), options)  # the service computes in its own thread
    else:
        follow(make())


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of the service on rank 0."""

    store: Store
    ranks: Ranks
    service: Service
    app: ASGIApp


def assemble(worker: Worker, options: ServeOptions) -> Assembled:
    """Return the parts of the service. It carries out requests after `service.start`.

    Args:
        worker: rank 0's worker.
        options: options of the service.
    """
    output, ranks = Path(options.output).resolve(), Ranks(worker)
    store, limits = Store(output), Limits(**options.limits)
    facts = ModelFacts(
        worker.vocabulary_size,
        worker.context_tokens,
        eos_token_ids(worker.strategy.unwrap(worker.slot.trained.model), worker.tokenizer),
        worker.tokenizer,
    )
    base = worker.options.base
    is_folder = Path(base).exists() or base.startswith("builtin:")
    tokenizer = str(output / "tokenizer") if is_folder else base
    if is_folder:
        worker.tokenizer.save_pretrained(tokenizer)
    names = frozenset({base, os.path.abspath(base), os.path.basename(os.path.abspath(base)), tokenizer})
    executor = Executor(store, ranks, facts, limits, output, worker.options.max_adapters)
    service = Service(
        store,
        executor,
        limits,
        output=output,
        base=base,
        names=names,
        max_rank=worker.options.max_rank,
        only_one=worker.options.is_owning,
        ping=lambda: ranks.call("ping"),
    )
    tenants = Tenants(check_keys(options.tenants))
    return Assembled(store, ranks, service, make_app(service, facts, tenants, host=options.host, tokenizer=tokenizer))


def _serve(worker: Worker, options: ServeOptions) -> None:
    parts = assemble(worker, options)
    service = parts.service

    def ready(address: str) -> None:
        service.start()
        click.echo(f"serving {worker.options.base} for training at {address}")

    serve_until_stopped(
        parts.app,
        server_limits(service),
        host=options.host,
        port=options.port,
        where=WHERE,
        ready=ready,
        grace_seconds=_GRACE_SECONDS,
        stops=lambda: stop_requested() or service.failed is not None,
    )
    ended = service.stop(_TURN_SECONDS)
    parts.store.close()
    if service.failed is not None:
        raise RlhfError("the service cannot continue, see the log", where=WHERE) from service.failed
    if ended:
        parts.ranks.stop()
