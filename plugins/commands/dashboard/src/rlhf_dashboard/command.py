"""`rlhf dashboard`: a read-only page about the runs of a folder."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

_BACKLOG = 128


@click.command("dashboard")
@click.argument("runs", default="runs", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="[RUNS]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8123, show_default=True, help="0 takes a free one.")
@click.option(
    "--api-key-env",
    metavar="VARIABLE",
    help="Environment variable with the key that the page asks for. Without it one is made and shown here.",
)
def dashboard(runs: Path, host: str, port: int, api_key_env: str | None) -> None:
    """Show the runs in a folder (default: runs) side by side in a browser, while they go on. Nothing is changed.

    Open http://HOST:PORT/#key=KEY with the key that is shown, or that of --api-key-env; or type it into the page.

    \b
    Examples:
      rlhf dashboard
      rlhf dashboard runs/first --port 9000
      rlhf dashboard --host 0.0.0.0 --api-key-env DASHBOARD_KEY
    """
    from rlhf_web import bound_socket, server_key

    key = server_key(api_key_env, where="rlhf dashboard", example="DASHBOARD_KEY")
    listening = bound_socket(host, port, where="rlhf dashboard")
    listening.listen(_BACKLOG)  # whoever comes before the first turn of the server waits
    asyncio.run(_serve(runs, host, listening, key or secrets.token_urlsafe(24), shows_key=key is None))


def server_config(app: ASGIApp) -> uvicorn.Config:
    """Bounds on what clients may take."""
    import uvicorn

    from .connection import BoundedConnection

    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        http=BoundedConnection,
        limit_concurrency=64,
        timeout_graceful_shutdown=1,
    )


async def _serve(runs: Path, host: str, listening: socket.socket, key: str, *, shows_key: bool) -> None:
    """Until SIGINT, SIGTERM or SIGHUP; a second one ends the process at once."""
    import uvicorn

    from rlhf_core.distributed import stop_signals

    from .app import make_app
    from .runs import Runs

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are taken below, so that the command ends as other servers of `rlhf` do."""
            yield

    app = make_app(Runs(runs), key=key, host=host)
    server = Server(server_config(app))
    loop = asyncio.get_running_loop()

    def ask_to_stop() -> None:
        for number in stop_signals():
            loop.remove_signal_handler(number)
        server.should_exit = True

    for number in stop_signals():
        loop.add_signal_handler(number, ask_to_stop)
    port = listening.getsockname()[1]
    address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    click.echo(f"the runs in {runs} at {address}")
    if shows_key:
        click.echo(f"open {address}#key={key}", err=True)
    await server.serve(sockets=[listening])
    click.echo("stopped")
