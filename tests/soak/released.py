"""Distributions built from this repository, and an empty environment into which they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from subprocess import Popen
from typing import IO

from running import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
INSTALL_SECONDS = 3000.0


def build_distributions(target: Path) -> Path:
    """Build a wheel and a source distribution of everything in this repository."""
    build = [sys.executable, str(ROOT / "release" / "build.py"), str(target)]
    subprocess.run(build, check=True, timeout=PATIENCE_SECONDS)
    folders = [ROOT, *ROOT.glob("libraries/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml"), ROOT / "start"]
    assert len([*target.glob("*.whl")]) == len([*target.glob("*.tar.gz")]) == len(folders)
    return target


def write_constraints(path: Path) -> Path:
    """Write the pins that the tests run with, as pip's constraints."""
    manifest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    locked = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8")
    pins = [line.removesuffix(" \\") for line in locked.splitlines() if "==" in line]
    path.write_text("\n".join([*pins, *manifest["tool"]["uv"]["constraint-dependencies"]]), encoding="utf-8")
    return path


class Environment:
    """An environment created by `python -m venv`, and an empty folder to work in."""

    def __init__(self, folder: Path, desk: Path, python: str = sys.executable) -> None:
        """Create the environment.

        Args:
            folder: The environment's folder, which does not exist yet.
            desk: The folder in which commands run.
            python: Its interpreter.
        """
        subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=PATIENCE_SECONDS)
        self.bin = folder / "bin"
        self.desk = desk
        # pip's settings are the machine's own; a path to sources must not be there.
        inherited = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        self.environment = {
            **inherited,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
        }

    def start(self, *command: str | Path, cwd: Path | None = None, output: IO[str] | None = None) -> Popen[str]:
        """Start a command. Its standard output, with stderr, goes to a pipe or to the file `output`."""
        return Popen(
            [str(part) for part in command],
            cwd=cwd or self.desk,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str | Path, seconds: float = PATIENCE_SECONDS, cwd: Path | None = None) -> str:
        """Run a command and return its output. Fails with the output if the command fails."""
        with self.start(*command, cwd=cwd) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            finally:
                process.kill()
        assert process.returncode == 0, f"{' '.join(map(str, command))}: exit {process.returncode}\n{output}"
        return output
