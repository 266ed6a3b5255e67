"""What no file of the repository may hold."""

import ast
import re
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_MATHEMATICS_LINES = 200
MATHEMATICS = ("libraries/forward/src/*", "libraries/objective/src/*/functional", "plugins/algorithms/*/src/*")
"""The folders of losses, estimators and algorithms."""

# Each pattern is written so that it does not match itself.
MACHINE_PATHS = re.compile(r"/(?:work|root|home/\w+|Users/\w+)/|(?<![\w.])/tm[p]/\w")
REGISTRY_HOSTS = re.compile(r"pypi\.or[g]|pythonhosted\.or[g]|download\.pytorch\.or[g]|--index-ur[l]|--find-link[s]")
CONFLICT_MARKERS = re.compile(r"^(<{7}|>{7})( |$)")
TEXT_SUFFIXES = {"", ".cfg", ".html", ".json", ".jsonl", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}


def too_long_functions(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source if source.count("\n") >= MAX_FUNCTION_LINES else "")
    return [
        f"{path.name}:{node.lineno} {node.name} ({length} lines)"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def lines_with(pattern: re.Pattern[str], files: list[Path], root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in files
        if path.suffix in TEXT_SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_files_are_short(root: Path, python_files: list[Path]) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files}
    long = {str(path.relative_to(root)): count for path, count in lengths.items() if count > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines, split them by idea: {long}"


def test_the_mathematics_is_in_short_files(root: Path) -> None:
    files = [path for folder in MATHEMATICS for path in root.glob(f"{folder}/*.py")]
    lengths = {str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lengths) > 40
    long = {path: count for path, count in lengths.items() if count > MAX_MATHEMATICS_LINES}
    assert not long, f"over {MAX_MATHEMATICS_LINES} lines: {long}"


def test_functions_fit_a_screen(python_files: list[Path]) -> None:
    long = [entry for path in python_files for entry in too_long_functions(path)]
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_no_merge_is_half_done(root: Path, files: list[Path]) -> None:
    assert not (found := lines_with(CONFLICT_MARKERS, files, root)), "\n".join(found)


def test_no_machine_paths(root: Path, files: list[Path]) -> None:
    assert not (found := lines_with(MACHINE_PATHS, files, root)), "\n".join(found)


def test_no_package_registry_hosts(root: Path, files: list[Path]) -> None:
    assert not (found := lines_with(REGISTRY_HOSTS, files, root)), "\n".join(found)


def test_no_file_is_unpickled(root: Path, library_files: list[Path]) -> None:
    unpickling = re.compile(
        r"\btorch\.load\(|\bpickle\.load\(|\bUnpickler\b|\ballow_pickle=True|\bimport (?:dill|joblib)\b"
    )
    assert not (found := lines_with(unpickling, library_files, root)), "\n".join(found)


def test_nothing_is_left_unwritten(root: Path, library_files: list[Path]) -> None:
    unwritten = re.compile(r"\bNotImplementedError\b|\bTOD[O]\b|\bFIXM[E]\b|\bXX[X]\b")
    assert not (found := lines_with(unwritten, library_files, root)), "\n".join(found)


def test_the_patterns_find_what_they_are_for() -> None:
    slash = "/"
    for text in (f"{slash}work{slash}main", f"open('{slash}tmp{slash}x')", f"{slash}home{slash}me{slash}a"):
        assert MACHINE_PATHS.search(text), text
    for text in ("plugins/rewards/http", "homework/", "network/root", "a/tmp/b"):
        assert not MACHINE_PATHS.search(text), text
    assert REGISTRY_HOSTS.search("https:" + "//py" + "pi.org/simple")


def test_the_command_prints_through_one_door(root: Path, library_files: list[Path]) -> None:
    """`output.echo` writes control characters out; what goes around it would obey a model's."""
    printing = re.compile(r"\bclick\.s?echo\(|(?<![.\w])print\(|\bConsole\(\)")
    doors = {"cli/rlhf_cli/output.py", "cli/rlhf_cli/progress.py"}
    command = [path for path in library_files if (root / "cli") in path.parents]
    files = [path for path in command if str(path.relative_to(root)) not in doors]
    assert files and not (found := lines_with(printing, files, root)), "\n".join(found)
