"""Lines of `rlhf_ray` executed by the seed examples, by a `--transport ray` run, and by both.

    python benchmarks/ray_lines.py [--missing]

A line is a statement, counted once even if it spans several lines. Docstrings and code for type checkers do not count.
Ray runs actors' methods on its own threads and ends them without notice, so `coverage` neither sees nor saves them.
Instead, the package is compiled with a call before every statement, which records the statement on its first execution.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "seed"
MARK = '''
"""Compiles the package with marks; this process and all below it import it, for it lies on their PYTHONPATH."""

import builtins, os, sys
from importlib.machinery import SourceFileLoader

sys.path.insert(0, os.environ["RAY_LINES_SCRIPT_FOLDER"])
out = os.open(os.environ["RAY_LINES_OUT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
seen = set()

def mark(file, line):
    if (file, line) not in seen:
        seen.add((file, line))
        os.write(out, f"{file}:{line}\\n".encode())

builtins._ray_lines_mark = mark
plain = SourceFileLoader.get_code

def get_code(self, name):
    path = self.path
    if os.path.dirname(path) != os.environ["RAY_LINES_PACKAGE"]:
        return plain(self, name)
    from ray_lines import marked
    return compile(marked(self.get_data(path), os.path.basename(path)), path, "exec", dont_inherit=True)

SourceFileLoader.get_code = get_code
'''
RUN = {
    "model": {"path": "builtin:tiny-digits"},
    "prompts": {"name": "sort-digits"},
    "eval": {"every_episodes": 2, "num_prompts": 8},
    "engine": {"max_new_tokens": 8},
    "rewards": ["exact-match"],
    "strategy": "ddp",
    "train": {"episodes": 4, "prompts_per_episode": 8, "train_batch_size": 8},
    "transport": {"name": "ray", "num_makers": 2, "num_trainers": 2},
}


def statements(tree: ast.Module) -> list[tuple[list[ast.stmt], int]]:
    """Yield every executable statement, as its block and its index in it."""
    found = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                found += [(block, place) for place, each in enumerate(block) if _counts(each)]
    return found


def _counts(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False  # a docstring, `...`
    return not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def marked(source: bytes, file: str) -> ast.Module:
    """Parse the module and add a recording call before every statement."""
    tree = ast.parse(source)
    for block, place in sorted(statements(tree), key=lambda found: -found[1]):
        line = block[place].lineno
        call = ast.parse(f"_ray_lines_mark({file!r}, {line})").body[0]
        for node in ast.walk(call):
            ast.copy_location(node, block[place])
        block.insert(place, call)
    return tree


def executed(command: list[str], out: Path, folder: Path, package: Path) -> set[str]:
    """Run a command. Return `file:line` of all statements executed by it and its child processes."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(MARK)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        "RAY_LINES_OUT": str(out),
        "RAY_LINES_PACKAGE": str(package),
        "RAY_LINES_SCRIPT_FOLDER": str(Path(__file__).resolve().parent),
    }
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    return set(out.read_text().split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="also list lines that are not executed by both")
    arguments = parser.parse_args()
    spec = find_spec("rlhf_ray")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    lines: set[str] = set()
    for path in package.glob("*.py"):
        lines |= {f"{path.name}:{block[place].lineno}" for block, place in statements(ast.parse(path.read_text()))}
    with tempfile.TemporaryDirectory(prefix="ray-lines-") as scratch:
        folder = Path(scratch)
        by_hand: set[str] = set()
        for script in sorted(EXAMPLES.glob("*.py")):
            by_hand |= executed([sys.executable, str(script)], folder / f"{script.stem}.lines", folder, package)
        (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
        train = [str(Path(sys.executable).with_name("rlhf")), "train", "run.yaml", "--output", "run"]
        by_run = executed(train, folder / "run.lines", folder, package)
    both = by_hand & by_run
    print("| file | lines | seed | run | both | both, of all |\n|---|---|---|---|---|---|")
    counts = [Counter(line.split(":")[0] for line in kind & lines) for kind in (lines, by_hand, by_run, both)]
    for file in sorted(counts[0]):
        numbers = [count[file] for count in counts]
        print(f"| {file} | {' | '.join(map(str, numbers))} | {numbers[3] / numbers[0]:.0%} |")
    numbers = [sum(count.values()) for count in counts]
    print(f"| all | {' | '.join(map(str, numbers))} | {numbers[3] / numbers[0]:.0%} |")
    if arguments.missing:
        for line in sorted(lines - both, key=lambda each: (each.split(":")[0], int(each.split(":")[1]))):
            print(line, "seed" if line in by_hand else "run" if line in by_run else "neither")


if __name__ == "__main__":
    main()
