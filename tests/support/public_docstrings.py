"""Lists public names whose docstring is incomplete in Google style.

A function documents each parameter under `Args:`, its result under `Returns:` or `Yields:` (unless the summary starts
with that word), and each error that it raises itself under `Raises:`. A class documents the parameters of its
`__init__`, and a protocol or abstract class every public method, and shows in `Example:` how it is called.

usage: public_docstrings.py [PATH...]    only names defined in these files or folders (default: all)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import public_surface  # noqa: E402
from reference_api import SECTION  # noqa: E402

Function = ast.FunctionDef | ast.AsyncFunctionDef
ABSTRACT = {"Protocol", "ABC"}
WELL_KNOWN = {"state_dict", "load_state_dict", "close"}
"""Methods of a protocol that may omit a docstring."""


def public_names() -> Iterator[tuple[str, Path, ast.stmt, ast.stmt | None]]:
    """Yield each definition once: module and name, its file and statement, and the next statement."""
    seen = set()
    pages = (public_surface.plugin_page(), public_surface.transport_page(), public_surface.library_surface())
    for page in pages:
        for module, names in page.items():
            for name in names:
                path, node, after = public_surface.defined_in(module, name)
                if (path, node.lineno) not in seen:
                    seen.add((path, node.lineno))
                    yield f"{module}.{name}", path, node, after


def problems(node: ast.stmt, after: ast.stmt | None) -> Iterator[str]:
    """Yield the missing parts of one definition's docstring."""
    if isinstance(node, Function):
        yield from _of_function(node)
    elif isinstance(node, ast.ClassDef):
        yield from _of_class(node)
    elif not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
        yield "no docstring"


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    text = ast.get_docstring(node) or ""
    yield from _of_summary(text)
    methods = [each for each in node.body if isinstance(each, Function)]
    for method in methods:
        if method.name == "__init__":
            own = ast.get_docstring(method) or ""
            yield from (f"__init__: no Args: {name}" for name in _undocumented(method, f"{text}\n\n{own}"))
    if ABSTRACT & {ast.unparse(base).partition("[")[0] for base in node.bases}:
        for method in methods:
            if not method.name.startswith("_") and method.name not in WELL_KNOWN:
                yield from (f"{method.name}: {each}" for each in _of_method(method))
        if not re.search(r"(?m)^Examples?:", text):
            yield "no Example: with its callers"


def _of_method(node: Function) -> Iterator[str]:
    text = ast.get_docstring(node) or ""
    if not text:
        yield "no docstring"
    yield from (f"no Args: {name}" for name in _undocumented(node, text))


def _of_function(node: Function) -> Iterator[str]:
    text = ast.get_docstring(node) or ""
    yield from _of_summary(text)
    yield from (f"no Args: {name}" for name in _undocumented(node, text))
    result = "None" if node.returns is None else ast.unparse(node.returns)
    has_returns = re.search(r"(?m)^(Returns|Yields):", text) or re.match(r"(Return|Yield|Whether)", text)
    if result not in ("None", "NoReturn", "Never") and not has_returns:
        yield "no Returns:"
    raised = re.search(r"(?ms)^Raises:(.*?)(^\S|\Z)", text)
    for each in ast.walk(node):
        if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call):
            name = ast.unparse(each.exc.func).rpartition(".")[2]
            if name.endswith("Error") and not (raised and name in raised[1]):
                yield f"no Raises: {name}"


def _of_summary(text: str) -> Iterator[str]:
    summary = text.partition("\n\n")[0]
    if not summary:
        yield "no docstring"
    elif not summary.rstrip().endswith((".", ":", "`")):
        yield "the summary does not end with a period"


def _undocumented(node: Function, text: str) -> Iterator[str]:
    _, _, after = f"\n{text}\n".partition("\nArgs:\n")
    section = SECTION.split(after)[0]
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None]
    for name in names:
        is_known = re.search(rf"(?m)^ +(\w+, )*\*{{0,2}}{name}(, [*\w]+)*( \(.*\))?:", section)
        if name not in ("self", "cls") and not name.startswith("_") and not is_known:
            yield name


def main() -> int:
    places = [Path(each).resolve() for each in sys.argv[1:]]
    count = 0
    for name, path, node, after in public_names():
        if places and not any(path.is_relative_to(place) for place in places):
            continue
        for problem in problems(node, after):
            count += 1
            print(f"{path.relative_to(ROOT)}:{node.lineno}: {name.rpartition('.')[2]}: {problem}")
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main())
