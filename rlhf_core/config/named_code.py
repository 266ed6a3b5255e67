"""Code and programs that a run file names in options, held against what may be run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..errors import PluginError
from ..plugins.trust import FileTrust, referenced_files
from .command import commands_of
from .problems import Problems
from .sections import ModelConfig


def check_model_code(model: ModelConfig, problems: Problems, trust: FileTrust) -> None:
    """Add a problem for code that comes with a model; a hub model's lies outside of every folder."""
    if not model.trust_remote_code or not trust.runs or trust.allows_model(model.path):
        return
    hint = "if you trust the model, add --trust"
    problems.add("model.trust_remote_code", f"code of {model.path} would be run, which no one here has named", hint)


def check_named_files(options: Mapping[str, Any], path: str, problems: Problems, trust: FileTrust) -> None:
    """Add a problem for each file of code that a plugin's options name, such as functions for tools."""
    for key, value in options.items() if trust.runs else ():
        for file in sorted(referenced_files(value)):
            try:
                trust.check(file, f"{path}.{key}")
            except PluginError as error:
                problems.add_error(f"{path}.{key}", error)


def check_commands(config: BaseModel, path: str, problems: Problems, trust: FileTrust) -> None:
    """Add a problem for each program that a plugin's options name."""
    for key, command in commands_of(config) if trust.runs else ():
        try:
            trust.check_command(command, f"{path}.{key}")
        except PluginError as error:
            problems.add(f"{path}.{key}", error.message, error.hint)
