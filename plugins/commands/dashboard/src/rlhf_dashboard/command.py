"""`rlhf dashboard`: a read-only page about the runs of a folder."""

from __future__ import annotations

import secrets
from pathlib import Path

import click


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
    from rlhf_web import ServerLimits, serve_until_stopped, server_key

    from .app import make_app
    from .runs import Runs

    given = server_key(api_key_env, where="rlhf dashboard", example="DASHBOARD_KEY")
    key = given or secrets.token_urlsafe(24)

    def tell(address: str) -> None:
        click.echo(f"the runs in {runs} at {address}/")
        if given is None:
            click.echo(f"open {address}/#key={key}", err=True)

    app, limits = make_app(Runs(runs), key=key, host=host), ServerLimits(max_connections=64)
    serve_until_stopped(app, limits, host=host, port=port, where="rlhf dashboard", ready=tell)
    click.echo("stopped")
