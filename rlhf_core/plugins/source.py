"""Reads the options of a function or class from a file's source, without running the file.

The source gives names and kinds of parameters, the types `int`, `float`, `str` and `bool` (also with `| None`), and
literal defaults. Anything else (another type, a computed default, a decorator) accepts any value here, and is checked
when the file is run.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..components import Component
from ..errors import PluginError
from .functions import PLAIN, UNREAD, UnreadOptions, no_such_name, options_model
from .trust import split_reference

_MAX_BYTES = 4 << 20
_PLAIN_TYPES: Mapping[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_options(reference: str, kind: str, *, where: str) -> tuple[Path, Component, tuple[str, ...]]:
    """The component of a plain `FILE.py:NAME` of a kind, without a build, and what is checked only when it is run.

    Raises `PluginError`, as `where`: no such file or name, not Python, or not a plugin's signature.
    """
    path, name = split_reference(reference, where)
    try:
        reader = _Reader(_parsed(path, where), path, where)
        return path, reader.component(name, kind), tuple(reader.unread)
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
        self.unread: list[str] = []

    def component(self, name: str, kind: str) -> Component:
        plain = PLAIN[kind]
        wanted: Any = ast.ClassDef if plain.is_class else _Function
        defined = [each for each in self._module.body if isinstance(each, (*_Function, ast.ClassDef))]
        named = [each for each in defined if each.name == name]
        found = [each for each in named if isinstance(each, wanted)]
        times = self._bound.count(name)
        if (times == 0 and "*" not in self._bound) or (times == 1 and named and not found):
            offered = [each.name for each in defined if isinstance(each, wanted)]
            raise no_such_name(self._path, name, offered, self._where, plain.is_class)
        if len(found) != 1 or times != 1:
            return self._nothing_told(f"{name} is not one plain definition")
        summary = (ast.get_docstring(found[0]) or "").strip().partition("\n")[0]
        if found[0].decorator_list:
            return self._nothing_told(f"{name} is decorated", summary)
        function: Any = found[0]
        if isinstance(function, ast.ClassDef):
            own = [each for each in function.body if isinstance(each, _Function) and each.name == "__init__"]
            if len(own) != 1 or own[0].decorator_list or function.keywords:
                return self._nothing_told(f"{name} has no plain __init__", summary)
            function = own[0]
        return Component(summary, options_model(self._stand_in(function), self._where, takes=plain.takes))

    def _nothing_told(self, why: str, summary: str = "") -> Component:
        self.unread.append(f"all options: {why}")
        return Component(summary, UnreadOptions)

    def _stand_in(self, function: Any) -> Callable[..., Any]:
        """A function with the signature of one in the file, as far as it can be read, that does nothing."""
        kinds, given = inspect.Parameter, function.args
        positional = [
            *((each, kinds.POSITIONAL_ONLY) for each in given.posonlyargs),
            *((each, kinds.POSITIONAL_OR_KEYWORD) for each in given.args),
            *((each, kinds.VAR_POSITIONAL) for each in [given.vararg] if each),
        ]
        parameters = [inspect.Parameter(each.arg, kind) for each, kind in positional]
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            read = {"annotation": self._type(argument), "default": self._default(argument, default)}
            parameters.append(inspect.Parameter(argument.arg, kinds.KEYWORD_ONLY, **read))
        parameters += [inspect.Parameter(each.arg, kinds.VAR_KEYWORD) for each in [given.kwarg] if each]

        def stand_in() -> None: ...

        stand_in.__name__ = function.name
        stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return stand_in

    def _type(self, argument: ast.arg) -> Any:
        if argument.annotation is None:
            return inspect.Parameter.empty
        text = argument.annotation
        written = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ast.unparse(text)
        name = written.removesuffix("| None").strip()
        if name not in _PLAIN_TYPES or name in self._bound:
            self.unread.append(f"type of {argument.arg}")
            return Any
        return _PLAIN_TYPES[name] | None if name != written.strip() else _PLAIN_TYPES[name]

    def _default(self, argument: ast.arg, node: ast.expr | None) -> Any:
        """The value, if it is a JSON literal."""
        if node is None:
            return inspect.Parameter.empty
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError):
            value = UNREAD
        if value is not None and not isinstance(value, (str, int, float, list, tuple, dict)):
            self.unread.append(f"default of {argument.arg}")
            return UNREAD
        return value


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
