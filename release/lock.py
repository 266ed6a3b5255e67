"""Write requirements/*.txt, the pinned dependencies with their hashes: `python release/lock.py [--upgrade]`.

The groups and workspace of the root `pyproject.toml` are resolved for every supported
Python. Without `--upgrade` a pin changes only if a manifest requires it. torch is left out, since its hash depends on
the build (CPU or CUDA): the Makefile pins its version. The files name no index, and installing needs pip only:
`pip install --no-deps --require-hashes -r requirements/lock.txt`.

`--lowest FILE` and `--newest FILE` write the lowest and the newest versions that the manifests allow to FILE instead,
in the form of `lock.txt`, for `make test-lowest` and `make test-newest`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

from distributions import ROOT, folders, name_of

TARGET = ROOT / "requirements"
MANIFESTS = [folder / "pyproject.toml" for folder in folders()]
EXTRAS = ("all", "gguf", "json", "math", "parquet", "structure", "tensorboard", "testing")
"""Extras of our own distributions that `make setup` installs. Heavy clients are in groups."""
_DEADLINE_SECONDS = 600.0


def write(upgrade: bool) -> None:
    """Resolve each file, the ones that share an environment with the pins of `lock.txt`."""
    upgraded = ["--upgrade"] if upgrade else []
    lock = TARGET / "lock.txt"
    write_lock(lock, upgraded)
    shared = [*upgraded, "-c", str(lock)]
    _compile(TARGET / "start.txt", [str(ROOT / "start" / "pyproject.toml"), *_groups("build"), *shared])
    _compile(TARGET / "extras.txt", [*_groups("extras"), *shared], alone="extras-alone")
    _compile(TARGET / "clients.txt", [*_groups("build", "clients"), *upgraded])


def write_lock(file: Path, options: list[str]) -> None:
    """Write what `make setup` installs. options: further arguments of uv, for example `--resolution=lowest-direct`."""
    extras = [f"--extra={name}" for name in EXTRAS]
    _compile(file, [*map(str, MANIFESTS), *extras, *_groups("build", "dev"), *options], alone="dev-alone")


def _groups(*names: str) -> list[str]:
    return [f"--group={ROOT / 'pyproject.toml'}:{name}" for name in names]


def _compile(file: Path, sources: list[str], alone: str | None = None) -> None:
    """Write one file. alone: group of packages that are added without their dependencies."""
    ours = [f"--no-emit-package={name}" for name in ("torch", *map(name_of, folders()))]
    _uv([*sources, *ours, "-o", str(file)])
    if alone is not None:
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
        with file.open("a", encoding="utf-8") as stream:
            stream.write(_uv(["--no-deps", "-"], given="\n".join(groups[alone])))


def _uv(arguments: list[str], given: str = "") -> str:
    """Run `uv pip compile` and return its output. Raises `SystemExit` with its message."""
    options = ["--universal", "--python-version=3.11", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", *options, *arguments],
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=_DEADLINE_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr or done.stdout)
    return done.stdout


def main() -> int:
    """Write the files and print how many pins each has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--upgrade", action="store_true", help="take the newest versions")
    which.add_argument("--lowest", type=Path, metavar="FILE", help="only write the lowest versions, to FILE")
    which.add_argument("--newest", type=Path, metavar="FILE", help="only write the newest versions, to FILE")
    given = parser.parse_args()
    single = given.lowest or given.newest
    if single is None:
        write(given.upgrade)
    else:
        single.parent.mkdir(parents=True, exist_ok=True)
        write_lock(single, ["--upgrade", f"--resolution={'lowest-direct' if given.lowest else 'highest'}"])
    for path in sorted(TARGET.glob("*.txt")) if single is None else [single]:
        print(f"{path}: {path.read_text(encoding='utf-8').count('==')} pins")
    return 0


if __name__ == "__main__":
    sys.exit(main())
