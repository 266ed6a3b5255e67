"""The YAML of run files: YAML 1.2 numbers, JSON values only, no duplicate keys."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ..errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML with the numbers of YAML 1.2 (`1e-6` is a number) and only JSON values."""


_FLOAT = re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")


_INT = re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$")


_REPLACED = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


_UNCLOSED = (
    (r"flow mapping: (expected ',' or|.*end of stream)", 'the "{{" is not closed, or a comma is missing after it'),
    (r"flow sequence: (expected ',' or|.*end of stream)", 'the "[" is not closed, or a comma is missing after it'),
    (r"quoted scalar: .*end of stream", "the quote is not closed"),
)
"""PyYAML's message about a bracket or quote -> explanation at the place it begins, without YAML's own terms."""
_MISTAKES = (
    (r"found character '\\t'", "YAML does not allow a tab here: use spaces"),
    (r"found character '(.+)' that cannot start", 'text that begins with "{}" needs quotes'),
    (r"flow node: .*stream end", 'the file ends before a "{{" or "[" is closed'),
    (r"mapping values are not", 'unexpected ":": put text that contains ": " in quotes, or check the indentation here'),
    (
        r": expected <block end>",
        "does not match the lines above: check the indentation, brackets and quotes of this line",
    ),
)
"""Likewise, for other common mistakes."""


_MAX_INT_CHARS = 100
_MAX_VALUES = 100_000
"""Maximum number of values in a file, counting each repetition by an alias."""


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > _MAX_INT_CHARS:
        raise yaml.constructor.ConstructorError(None, None, f"a number of {len(text)} characters", node.start_mark)
    return int(text, 0) if text.lstrip("+-")[:2] in ("0x", "0o") else int(text)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Construct a mapping, refusing duplicate keys and keys that are not text."""
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True) if key_node.tag != "tag:yaml.org,2002:merge" else None
        if not isinstance(key, str) and key_node.tag != "tag:yaml.org,2002:merge":
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
        if key in seen:
            line = seen[key] + 1
            message = f'the key "{key}" is set twice, first on line {line}'
            raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
        if key is not None:
            seen[key] = key_node.start_mark.line
    loader.flatten_mapping(node)
    return {loader.construct_object(k): loader.construct_object(v, deep=True) for k, v in node.value}


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


class _Dumper(yaml.SafeDumper):
    """Quotes text that a YAML 1.1 reader or ours would read as another type."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def dump_yaml(value: Any) -> str:
    """Return `value` as YAML that `parse_yaml` reads back unchanged. Keys keep their order.

    Example:
        >>> print(dump_yaml({"path": "no", "lr": 1e-06}), end="")
        path: 'no'
        lr: 1.0e-06
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)


def _load(text: str) -> Any:
    """Parse one document, with a bound on its expanded size."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {}, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: yaml.Node, known: dict[int, int], open_nodes: set[int]) -> int:
    """Return the number of values in a node with aliases expanded, which could otherwise exhaust memory."""
    if id(node) in known:
        return known[id(node)]
    if id(node) in open_nodes:
        raise yaml.composer.ComposerError(None, None, "a value that contains itself", node.start_mark)
    open_nodes.add(id(node))
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    size = 1 if isinstance(node, yaml.ScalarNode) else 1 + sum(_check_size(part, known, open_nodes) for part in parts)
    if size > _MAX_VALUES:
        message = f"more than {_MAX_VALUES:,} values, counting each repetition by an alias"
        raise yaml.composer.ComposerError(None, None, message, node.start_mark)
    known[id(node)] = size
    return size


def _explain(error: yaml.MarkedYAMLError) -> tuple[str, yaml.Mark | None]:
    """Explain a common mistake, at the place to correct. Others keep PyYAML's message."""
    message, mark = f"{error.context}: {error.problem}", error.problem_mark or error.context_mark
    for mistakes, place in ((_UNCLOSED, error.context_mark), (_MISTAKES, mark)):
        for pattern, explanation in mistakes:
            if (match := re.search(pattern, message)) is not None:
                return explanation.format(*match.groups()), place
    return " ".join(part for part in (error.context, error.problem) if part), mark


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML 1.2 with JSON values only.

    Args:
        text: one YAML document.
        where: name of its source in errors.

    Returns:
        The value: a dict, list, text, number, boolean or None.

    Raises:
        ConfigError: the text is invalid. Names the line and column.

    Example:
        >>> parse_yaml("{name: adamw, lr: 1e-6}", "run.yaml")
        {'name': 'adamw', 'lr': 1e-06}
    """
    try:
        return _load(text)
    except yaml.MarkedYAMLError as error:
        message, mark = _explain(error)
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(message, where=f"{where}{line}", hint="fix the YAML on that line") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not YAML: {error}", where=where) from error
