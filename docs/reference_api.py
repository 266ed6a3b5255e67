"""Pages of the site about the public names of core and the libraries, one per module, from their docstrings.

The source is parsed, not imported. `docs/public_surface.py` defines which names are public.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping

from public_surface import defined_in, library_surface, surface

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples):$", re.MULTILINE)


def api_pages(note: str) -> dict[str, str]:
    """Return file name -> text of each module's page."""
    return {f"{module}.md": _page(module, names, note) for module, names in (surface() | library_surface()).items()}


def _page(module: str, names: Mapping[str, str], note: str) -> str:
    parts = [f"# `{module}`", note, f"Names that a plugin may import from `{module}`."]
    for name in names:
        _, node, after = defined_in(module, name)
        parts += [f"## `{name}`", *_description_parts(node, after)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _description_parts(node: ast.stmt, after: ast.stmt | None) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [_code(_class_line(node)), prose(ast.get_docstring(node)), *_fields(node), *_methods(node)]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [_code(_signature(node)), prose(ast.get_docstring(node))]
    return [_code(ast.unparse(node)), prose(_docstring(after))]


def _class_line(node: ast.ClassDef) -> str:
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {node.name}({bases})" if bases else f"class {node.name}"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the function's signature, with one parameter per line if it is long."""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"{word} {node.name}({ast.unparse(node.args)}){returns}"
    if len(line) <= 100:
        return line
    return f"{word} {node.name}(\n    {_by_line(ast.unparse(node.args))},\n){returns}"


def _by_line(parameters: str) -> str:
    """Put each parameter on its own line: split at commas outside of brackets."""
    depth, start, lines = 0, 0, []
    for place, letter in enumerate(parameters):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            lines.append(parameters[start:place].strip())
            start = place + 1
    return ",\n    ".join([*lines, parameters[start:].strip()])


def _fields(node: ast.ClassDef) -> list[str]:
    """Return a table of public fields with types, defaults and docstrings."""
    rows = []
    for field, after in itertools.zip_longest(node.body, node.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_":
            default = "" if field.value is None else f"`{ast.unparse(field.value)}`"
            meaning = " ".join((_docstring(after) or _description(field.value)).split())
            rows.append([f"`{field.target.id}`", f"`{ast.unparse(field.annotation)}`", default, meaning])
    return [_table(["field", "type", "default", "meaning"], rows)] if rows else []


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = {ast.unparse(each) for each in method.decorator_list}
        is_public = method.name[0] != "_" or method.name in {"__init__", "__call__", "__len__", "__getitem__"}
        if not is_public or any(mark.endswith(".setter") for mark in marks):
            continue
        if method.name == "__init__" and len(method.args.args) + len(method.args.kwonlyargs) == 1:
            continue
        kind = "property " if "property" in marks else "required " if "abstractmethod" in marks else ""
        yield f"### {kind}`{node.name}.{method.name}`"
        yield _code(_signature(method))
        yield prose(ast.get_docstring(method))


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def _description(value: ast.expr | None) -> str:
    """Return the `description=` of a pydantic field."""
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg == "description":
            return str(ast.literal_eval(keyword.value)) if isinstance(keyword.value, ast.Constant) else ""
    return ""


def prose(text: str | None) -> str:
    """Convert a docstring to Markdown: sections become lists, examples and other indented parts become code."""
    lines: list[str] = []
    section = ""
    is_code = False
    for line in (text or "").splitlines():
        is_indented = line.startswith("    ")
        if match := SECTION.match(line):
            section = match[1]
        elif line.strip() and not is_indented:
            section = ""
        in_list = section not in ("", "Example", "Examples")
        if line.strip() and is_code != (is_code := is_indented and not in_list):
            lines.append("\n```text" if is_code else "```\n")
        if match:
            lines += ["", line, ""]
        elif in_list and is_indented and line[4] != " ":
            name, colon, rest = line.strip().partition(":")
            lines.append(f"- `{name}`:{rest}" if colon and " " not in name else f"- {line.strip()}")
        elif in_list and is_indented:
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line[4:] if is_code and section else line)
    text = "\n".join([*lines, *(["```"] if is_code else [])])
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _code(text: str) -> str:
    return f"```py\n{text}\n```"


def _table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
