"""Reads a run file and applies flags and `--set` to it. Nothing is checked against a schema yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ..errors import ConfigError
from ..plugins.discovery import discover
from ..util.redact import learn
from ..util.yaml12 import parse_yaml

Override = str | tuple[str, Any]
"""`"a.b=value"` with the value as YAML, or the path and the value itself."""

PLUGIN_SECTIONS: Mapping[str, str] = {
    "algorithm": "algorithms",
    "strategy": "strategies",
    "engine": "engines",
    "transport": "transports",
    "prompts": "prompts",
    "optimizer": "optimizers",
}
"""Sections that select one plugin -> its kind. `rewards`, `eval.prompts` and `eval.sets` also select plugins."""

OWN_REWARD = "environment"
"""Name of the reward that a section's player gives its rows (`Section.reward_weight`)."""


class LoadedRun(dict[str, Any]):
    """A run as one mapping, with the `--set` overrides that changed it, for error messages and text options."""

    def __init__(self, run: Mapping[str, Any], overrides: Mapping[str, str]) -> None:
        super().__init__(run)
        self.overrides = overrides
        """Key -> its value as typed."""


_MAX_BYTES = 16 << 20
_LARGEST_INT = 2**256


def read_run_file(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a run file.

    Raises:
        ConfigError: the file is missing, is not UTF-8 or YAML, or does not contain a mapping.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError("is a pipe or device, not a file", where=str(path), hint="rlhf train RUN.yaml")
        if path.is_file() and path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"is larger than {_MAX_BYTES:,} bytes", where=str(path))
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read the run file: {reason}", where=str(path), hint="rlhf train RUN.yaml") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})", where=str(path)) from error
    loaded = parse_yaml(text, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"a run file must be a mapping of sections, this is a {type(loaded).__name__}",
            where=str(path),
            hint="begin with `model: {path: …}`, and list the sections with `rlhf config schema`",
        )
    learn(loaded)
    return loaded


def parse_override(text: str) -> tuple[str, Any]:
    """Split `"a.b=value"` into `("a.b", value)`, with the value parsed as YAML. Raises `ConfigError`.

    Example:
        >>> parse_override("optimizer.lr=1e-6")
        ('optimizer.lr', 1e-06)
    """
    path, equals, value = text.partition("=")
    path = path.strip()
    learn(value, path)
    if not equals or not path or not all(path.split(".")):
        raise ConfigError(f'"{text}" is not key.path=value', where="--set", hint="--set optimizer.lr=1e-6")
    if not value.strip():
        hint = f"--set {path}=null for the default, --set '{path}=\"\"' for an empty text"
        raise ConfigError("needs a value", where=f"--set {path}", hint=hint)
    parsed = parse_yaml(value, f"--set {path}")
    learn(parsed, path)
    return path, parsed


def parse_reward(text: str) -> dict[str, Any]:
    """Return an entry of `rewards` for `NAME[:weight]` or `FILE.py:FUNCTION[:weight]`.

    Raises:
        ConfigError: the weight is not a finite number.

    Example:
        >>> parse_reward("exact-match:0.5")
        {'name': 'exact-match', 'weight': 0.5}
        >>> parse_reward("mine.py:brevity")
        {'name': 'mine.py:brevity', 'weight': 1.0}
    """
    name, colon, weight = text.rpartition(":")
    is_function = name.endswith(".py") and weight.isidentifier()
    if not colon or is_function:
        name, weight = text, "1"
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not name.strip() or not math.isfinite(number):
        raise ConfigError(
            f'"{text}" is not a reward: "{weight}" is not a weight',
            where="--reward",
            hint="--reward NAME[:weight] or --reward FILE.py:FUNCTION[:weight]",
        )
    return {"name": name.strip(), "weight": number}


def plain(value: Any, where: str = "") -> Any:
    """Return `value` with mappings as dicts, sequences as lists and paths as text. Raises `ConfigError` for others."""
    if isinstance(value, str):
        _check_text(value, where)
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise ConfigError("is a number with too many digits", where=where or "run")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"the key {key!r} is not text", where=where or "run")
            _check_text(key, where)
        return {key: plain(each, f"{where}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(each, f"{where}.{index}".lstrip(".")) for index, each in enumerate(value)]
    hint = None
    if callable(value):
        name = getattr(value, "__name__", "NAME")
        hint = f"write it into a file and name it: FILE.py:{name}"
        hint += f", or, for a reward: train(run, rewards=[{name}])" if where.startswith("rewards") else ""
    raise ConfigError(f"a run file cannot contain a {type(value).__name__}", where=where or "run", hint=hint)


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"contains half of a character (a lone surrogate, at {error.start})", where=where or "run"
        ) from None


def expand(run: Mapping[str, Any]) -> dict[str, Any]:
    """Expand short forms such as `algorithm: ppo`, `rewards: [exact-match:0.5]`. Invalid shapes are left unchanged."""
    full: dict[str, Any] = plain(run)
    for section in (*PLUGIN_SECTIONS, *discover("sections")):
        _expand_name(full, section)
    if isinstance(full.get("optimizer"), dict):
        _expand_name(full["optimizer"], "schedule")
    evaluation = full.get("eval")
    if isinstance(evaluation, dict):
        sets = evaluation.get("sets")
        for each in (evaluation, *(sets.values() if isinstance(sets, dict) else ())):
            if isinstance(each, dict):
                _expand_name(each, "prompts")
                _expand_rewards(each)
    _expand_rewards(full)
    return full


def _expand_name(section: dict[str, Any], key: str) -> None:
    if isinstance(section.get(key), str):
        section[key] = {"name": section[key]}


def _expand_rewards(section: dict[str, Any]) -> None:
    rewards = section.get("rewards")
    if isinstance(rewards, list):
        section["rewards"] = [parse_reward(each) if isinstance(each, str) else each for each in rewards]


def apply_override(run: dict[str, Any], path: str, value: Any) -> None:
    """Set `run["a"]["b"]` for `a.b`, creating missing mappings. A number is an index of a list.

    Raises:
        ConfigError: the path goes through a scalar, or to a missing list item.

    Example:
        >>> run = {"rewards": [{"name": "exact-match"}]}
        >>> apply_override(run, "rewards.0.weight", 0.5)
        >>> run
        {'rewards': [{'name': 'exact-match', 'weight': 0.5}]}
    """
    keys = path.split(".")
    place: Any = run
    for depth, key in enumerate(keys):
        if not isinstance(place, dict | list):
            parent = ".".join(keys[:depth])
            raise ConfigError(f"{parent} is {place!r}, which does not contain keys", where=f"--set {path}")
        at: Any = _index(place, key, path) if isinstance(place, list) else key
        if depth == len(keys) - 1:
            place[at] = plain(value, path)
        else:
            if isinstance(place, dict) and place.get(at) is None:
                place[at] = {}
            place = place[at]


def _index(items: list[Any], key: str, path: str) -> int:
    if key.isascii() and key.isdigit() and int(key) < len(items):
        return int(key)
    numbers = f"0 to {len(items) - 1}" if items else "none, it is empty"
    raise ConfigError(f'"{key}" is not an item of the list (items: {numbers})', where=f"--set {path}")


def load_run(source: str | Path | Mapping[str, Any], overrides: Sequence[Override] = ()) -> LoadedRun:
    """Return a run as one mapping: the file or mapping, then `overrides` in order. Later ones win.

    Short forms are expanded. `resolve` checks the result. Raises `ConfigError`.
    """
    run = expand(source if isinstance(source, Mapping) else read_run_file(source))
    typed = dict(source.overrides) if isinstance(source, LoadedRun) else {}
    for override in overrides:
        path, value = parse_override(override) if isinstance(override, str) else override
        apply_override(run, path, value)
        run = expand(run)
        typed.pop(path, None)
        if isinstance(override, str):
            typed[path] = override.partition("=")[2].strip()
    return LoadedRun(run, typed)
