"""Values of `--set` and `--tenant`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rlhf_core.errors import UserInputError
from rlhf_core.util import parse_yaml

from .limits import Limits

_MODEL_OPTIONS = ("dtype", "micro_batch_tokens", "gradient_checkpointing")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Options set with `--set`, by section."""

    strategy: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    transport: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)


def parse_settings(changes: Sequence[str]) -> Settings:
    """Return the options of `SECTION.KEY=VALUE` texts.

    Args:
        changes: the texts.

    Raises:
        UserInputError: a text has another form, or its section or option is unknown.

    Example:
        >>> parse_settings(["limits.models=4", "strategy.precision=bf16"]).limits
        {'models': 4}
    """
    settings = Settings()
    known = {"model": _MODEL_OPTIONS, "limits": tuple(each.name for each in fields(Limits))}
    for change in changes:
        key, separator, text = change.partition("=")
        section, _, name = key.partition(".")
        if not separator or not name or not hasattr(settings, section):
            raise UserInputError(
                f"{change!r} is not SECTION.KEY=VALUE",
                where="--set",
                hint=f"the sections are {', '.join(each.name for each in fields(Settings))}",
            )
        if section in known and name not in known[section]:
            raise UserInputError(f"{key!r} is unknown", where="--set", hint=f"known: {', '.join(known[section])}")
        value = parse_yaml(text, "--set")
        if section == "limits" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise UserInputError(f"{key} is a number above 0, not {text!r}", where="--set")
        if section == "limits" and isinstance(getattr(Limits(), name), int):
            if value % 1:
                raise UserInputError(f"{key} is a whole number, not {text!r}", where="--set")
            value = int(value)
        getattr(settings, section)[name] = value
    return settings


def parse_tenants(texts: Sequence[str]) -> dict[str, str]:
    """Return name -> environment variable of `NAME=VARIABLE` texts. Raises `UserInputError`.

    Args:
        texts: the texts.
    """
    tenants: dict[str, str] = {}
    for text in texts:
        name, separator, variable = text.partition("=")
        if not separator or not variable or not _NAME.fullmatch(name) or name in tenants:
            raise UserInputError(
                f"{text!r} is not NAME=VARIABLE, or its name is used twice",
                where="--tenant",
                hint="name the environment variable that has the key, such as --tenant alice=ALICE_KEY",
            )
        tenants[name] = variable
    return tenants
