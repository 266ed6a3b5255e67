"""`rlhf dashboard`: a read-only page about the runs of a folder."""

from __future__ import annotations

import secrets
from pathlib import Path

import click


@click.command("dashboard")
@click.argument("runs", default="runs", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="[RUNS]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8123, show_default=True, help="0 selects a free port.")
@click.option(
    "--api-key-env",
    metavar="VARIABLE",
    help="Environment variable with the page's key. Without it, a new key is created and printed.",
)
def dashboard(runs: Path, host: str, port: int, api_key_env: str | None) -> None:
    """Show the runs in a folder (default: runs) side by side in a browser, also while they are running. Read-only.

    Open http://HOST:PORT/#key=KEY with the printed key or that of --api-key-env, or enter the key on the page.

    \b
    Examples:
      rlhf dashboard
      rlhf dashboard runs/first --port 9000
      rlhf dashboard --host 0.0.0.0 --api-key-env DASHBOARD_KEY
    """
    from rlhf_web import ServerLimits, serve_until_stopped, server_key

    from .app import make_app
    from .runs import Runs

    user_key = server_key(api_key_env, where="rlhf dashboard", example="DASHBOARD_KEY")
    key = user_key or secrets.token_urlsafe(24)

    def show(address: str) -> None:
        click.echo(f"the runs in {runs} at {address}/")
        if user_key is None:
            click.echo(f"open {address}/#key={key}", err=True)

    app, limits = make_app(Runs(runs), key=key, host=host), ServerLimits(max_connections=64)
    serve_until_stopped(app, limits, host=host, port=port, where="rlhf dashboard", ready=show)
    click.echo("stopped")
