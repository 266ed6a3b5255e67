"""`rlhf serve`: serves a trained model by the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import os

import click


@click.command("serve")
@click.argument("model", metavar="RUN|DIR")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 selects a free port.")
@click.option(
    "--api-key-env",
    metavar="VARIABLE",
    help="Environment variable with the key that requests must send. Without it, a new key is created and printed.",
)
@click.option("--engine", default="hf", show_default=True, help="Engine that generates answers.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Token limit per answer."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
def serve(
    model: str,
    host: str,
    port: int,
    api_key_env: str | None,
    engine: str,
    max_new_tokens: int,
    seed: int,
    device: str,
) -> None:
    """Serve a run's model, or the model in a folder, to clients of OpenAI and Anthropic.

    The APIs are OpenAI's chat completions, completions and Responses (base URL with /v1) and Anthropic's Messages (base
    URL without /v1). Besides the usual sampling options, requests may contain tools and stream, and those to OpenAI's
    APIs n, logprobs and echo. Use `rlhf export` to convert a checkpoint to a model folder.

    \b
    Examples:
      rlhf serve runs/first
      rlhf serve runs/first --port 9000
      rlhf serve ./my-model --host 0.0.0.0 --api-key-env SERVE_KEY
    """
    from contextlib import closing

    from rlhf_core.config import ModelConfig
    from rlhf_episodes import Keys
    from rlhf_web import ServerLimits, serve_until_stopped, server_key

    from .server import make_app
    from .serving import model_of, serve_model

    key = server_key(api_key_env, where="rlhf serve", example="SERVE_KEY")
    config = ModelConfig(path=model_of(model), device=device)
    served = serve_model(config, engine=engine, seed=seed, max_new_tokens=max_new_tokens)
    keys, limits = Keys(), ServerLimits()
    used_key, name = keys.add(served, key), _name(model)

    def show(address: str) -> None:
        click.echo(f"serving {config.path} as {name} at {address}/v1 (Anthropic's clients: {address})")
        if key is None:
            click.echo(f"key: {used_key}", err=True)

    app = make_app(keys.find, limits, name)
    with closing(served):
        serve_until_stopped(app, limits, host=host, port=port, where="rlhf serve", ready=show, grace_seconds=0.0)
    click.echo("stopped")


def _name(model: str) -> str:
    """The model's name in requests: the last part of its path."""
    return os.path.basename(os.path.abspath(model)) or model
