"""Examples in docstrings run as written."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "rlhf_core/**/*.py",
    "cli/rlhf_cli/**/*.py",
    "*/src/**/*.py",
    "libraries/*/src/**/*.py",
    "plugins/*/*/src/**/*.py",
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if "src" in parts:
        parts = parts[parts.index("src") + 1 :]
    parts = parts[1:] if parts[0] == "cli" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WITH_EXAMPLES = [
    path
    for pattern in SOURCES
    for path in sorted(ROOT.glob(pattern))
    if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=_module_name)
def test_examples_of_a_module_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(_module_name(path))
    except ModuleNotFoundError as error:
        assert error.name is not None
        pytest.skip(f"{error.name} is not installed")
    for example in doctest.DocTestFinder(exclude_empty=True).find(module):
        report: list[str] = []
        failed, _ = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=report.append)
        assert not failed, "".join(report)


def test_at_least_forty_docstrings_have_an_example() -> None:
    parser = doctest.DocTestParser()
    sources = (path.read_text(encoding="utf-8") for path in WITH_EXAMPLES)
    docstrings = (text for source in sources for text in re.findall(r'"""(.*?)"""', source, re.DOTALL))
    assert sum(bool(parser.get_examples(text)) for text in docstrings) >= 40
