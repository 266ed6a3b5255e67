"""Build a wheel and a source distribution of everything in this repository: `python release/build.py [FOLDER]`.

Each wheel is built from the unpacked source distribution, so one that lacks a file fails here. `make dist` runs this.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from distributions import ROOT, folders, name_of, run_module, version

_DEADLINE_SECONDS = 600.0


def build(target: Path) -> list[Path]:
    """Build into the folder, after removing older builds. Raises `SystemExit` if a build fails."""
    target.mkdir(parents=True, exist_ok=True)
    for old in (*target.glob("rlhf_*.whl"), *target.glob("rlhf_*.tar.gz")):
        old.unlink()
    for folder in folders():
        print(f"building {name_of(folder)} {version()}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            _hatchling(folder, "sdist", Path(scratch))
            (archive,) = Path(scratch).glob("*.tar.gz")
            with tarfile.open(archive) as opened:
                opened.extractall(scratch, filter="data")
            _hatchling(Path(scratch) / archive.name.removesuffix(".tar.gz"), "wheel", target)
            shutil.move(archive, target / archive.name)
    return sorted(target.glob(f"rlhf_*-{version()}*"))


def _hatchling(folder: Path, kind: str, target: Path) -> None:
    done = run_module(folder, "hatchling", "build", "-t", kind, "-d", str(target), seconds=_DEADLINE_SECONDS)
    if done.returncode != 0:
        raise SystemExit(f"{kind} of {folder}: hatchling ended with {done.returncode}\n{done.stdout}")


def main() -> int:
    """Build, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", help="target folder, by default dist/")
    target: Path = parser.parse_args().folder.resolve()
    print(f"{len(build(target))} files in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
