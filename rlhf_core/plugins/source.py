"""Reads the options of a function or class from a file's source, without running the file.

The source gives names and kinds of parameters, the types `int`, `float`, `str` and `bool` (also with `| None`), and
literal defaults. Anything else (another type, a computed default, a decorator) accepts any value here, and is checked
when the file is run.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from ..errors import PluginError
from .functions import UnreadOptions, no_such_name, options_model
from .trust import split_reference

_MAX_BYTES = 4 << 20
_PLAIN: Mapping[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of one `FILE.py:NAME`, as far as its source shows them."""

    path: Path
    summary: str
    """First line of its docstring."""
    model: type[BaseModel]
    """Its options, as far as they can be read."""
    unread: tuple[str, ...]
    """Descriptions of the parts that are checked only when the file is run."""


def read_options(
    reference: str, *, where: str, kind: Literal["function", "class"] = "function", takes: str | None = "the rollouts"
) -> SourceOptions:
    """The options of `FILE.py:NAME`: keyword-only parameters of the function, or of the class's constructor.

    takes: the one positional parameter, in words; None allows any. Raises `PluginError`, as `where`: no such file or
    name, not Python, or not a plugin's signature.
    """
    path, name = split_reference(reference, where)
    try:
        return _Reader(_parsed(path, where), path, where).options(name, kind, takes)
    except RecursionError:
        raise PluginError(f"{path.name} is nested too deeply to be read", where=where) from None


def _parsed(path: Path, where: str) -> ast.Module:
    try:
        with path.open("rb") as file:
            source = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise PluginError(f"{path.name} cannot be read: {error.strerror or error}", where=where) from error
    if len(source) > _MAX_BYTES:
        raise PluginError(f"{path.name} is larger than {_MAX_BYTES:,} bytes", where=where)
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError) as error:
        raise PluginError(f"{path.name} is no Python: {type(error).__name__}: {error}", where=where) from error


class _Reader:
    """One parsed file."""

    def __init__(self, module: ast.Module, path: Path, where: str) -> None:
        self._module, self._path, self._where = module, path, where
        self._bound = list(_bound_names(module))

    def options(self, name: str, kind: str, takes: str | None) -> SourceOptions:
        wanted: Any = ast.ClassDef if kind == "class" else _Function
        found = [each for each in self._module.body if isinstance(each, wanted) and each.name == name]
        other: Any = _Function if kind == "class" else ast.ClassDef
        is_other = any(isinstance(each, other) and each.name == name for each in self._module.body)
        times = self._bound.count(name)
        if (times == 0 and "*" not in self._bound) or (times == 1 and is_other):
            offered = [each.name for each in self._module.body if isinstance(each, wanted)]
            raise no_such_name(self._path, name, offered, self._where, kind)
        if len(found) != 1 or times != 1:
            return self._nothing_told(f"all options: {name} is not one plain definition")
        summary = (ast.get_docstring(found[0]) or "").strip().partition("\n")[0]
        if found[0].decorator_list:
            return self._nothing_told(f"all options: {name} is decorated", summary)
        if kind == "function":
            return self._from_signature(found[0], summary, takes)
        constructors = [each for each in found[0].body if isinstance(each, _Function) and each.name == "__init__"]
        if len(constructors) != 1 or constructors[0].decorator_list or found[0].keywords:
            return self._nothing_told(f"all options: {name} has no plain __init__", summary)
        return self._from_signature(constructors[0], summary, None)

    def _nothing_told(self, what: str, summary: str = "") -> SourceOptions:
        return SourceOptions(self._path, summary, UnreadOptions, (what,))

    def _from_signature(self, function: Any, summary: str, takes: str | None) -> SourceOptions:
        kinds = inspect.Parameter
        given = function.args
        parameters = [inspect.Parameter(each.arg, kinds.POSITIONAL_ONLY) for each in given.posonlyargs]
        parameters += [inspect.Parameter(each.arg, kinds.POSITIONAL_OR_KEYWORD) for each in given.args]
        parameters += [inspect.Parameter(each.arg, kinds.VAR_POSITIONAL) for each in [given.vararg] if each]
        unread: list[str] = []
        without_value: set[str] = set()
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            annotation: Any = inspect.Parameter.empty
            if argument.annotation is not None:
                annotation, is_whole = self._type(argument.annotation)
                if not is_whole:
                    unread.append(f"type of {argument.arg}")
            value: Any = inspect.Parameter.empty
            if default is not None:
                value, is_literal = _literal(default)
                if not is_literal:
                    unread.append(f"default of {argument.arg}")
                    without_value.add(argument.arg)
            parameters.append(inspect.Parameter(argument.arg, kinds.KEYWORD_ONLY, annotation=annotation, default=value))
        parameters += [inspect.Parameter(each.arg, kinds.VAR_KEYWORD) for each in [given.kwarg] if each]
        model = options_model(
            _stand_in(function.name, parameters), self._where, takes=takes, without_default=frozenset(without_value)
        )
        return SourceOptions(self._path, summary, model, tuple(unread))

    def _type(self, node: ast.expr) -> tuple[Any, bool]:
        """The type of an annotation, and whether it is complete; `Any` if it cannot be read."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self._type(ast.parse(node.value, mode="eval").body)
            except (SyntaxError, ValueError, MemoryError):
                return Any, False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and ast.unparse(node.right) == "None":
            plain, is_whole = self._type(node.left)
            return (plain | None if is_whole else Any), is_whole
        if isinstance(node, ast.Name) and node.id in _PLAIN and node.id not in self._bound:
            return _PLAIN[node.id], True
        return Any, False


def _literal(node: ast.expr) -> tuple[Any, bool]:
    """The value, and whether it is a JSON literal."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return None, False
    known = value is None or isinstance(value, (str, int, float, list, tuple, dict))
    return (value, True) if known else (None, False)


def _stand_in(name: str, parameters: list[inspect.Parameter]) -> Callable[..., Any]:
    """A function with this signature that does nothing."""

    def stand_in() -> None: ...

    stand_in.__name__ = name
    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return stand_in


def _bound_names(scope: ast.AST) -> Iterator[str]:
    """Every name bound in a scope, once per binding; `*` for a star import."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (*_Function, ast.ClassDef)):
            yield node.name
            continue  # its body is a separate scope
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        yield from _bound_names(node)
