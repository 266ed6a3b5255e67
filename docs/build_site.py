"""Build the site of these pages into build/site: `python docs/build_site.py [--check]`.

Pages link to files all over the repository. Pages and linked files are therefore copied to build/site-pages under their
path in the repository, and Sphinx builds the site from there with docs/conf.py. Dead links, missing anchors and pages
without a menu entry are errors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from reference_api import api_pages

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PAGES = BUILD / "site-pages"
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "docs/images/*.png",
    "docs/reference/*.json",
    "start/README.md",
    "libraries/*/README.md",
    "plugins/*/*/README.md",
    "examples/*.ipynb",
    "examples/*/README.md",
    "recipes/**/*.md",
    "recipes/**/*.png",
    "benchmarks/**/*.md",
)
"""Files of the site. Pages that need the sources next to them are linked by their path instead."""
_DEADLINE_SECONDS = 600.0


def sources() -> Iterator[Path]:
    """Yield the files of the site."""
    for pattern in PATTERNS:
        yield from (path for path in sorted(ROOT.glob(pattern)) if not path.is_relative_to(BUILD))


def index() -> str:
    """Return the first page: the README, the menu of docs/menu.yaml, and every page that the menu does not name."""
    menu: dict[str, list[str]] = yaml.safe_load((ROOT / "docs" / "menu.yaml").read_text(encoding="utf-8"))
    left = [path.relative_to(ROOT).as_posix() for path in sources() if path.suffix == ".md" and path.parent != ROOT]
    left = [name for name in left if not any(name in pages for pages in menu.values())]
    for pages in menu.values():
        for pattern in [page for page in pages if "*" in page]:
            place = pages.index(pattern)
            pages[place : place + 1] = [name for name in left if _matches(name, pattern)]
            left = [name for name in left if not _matches(name, pattern)]
    modules = [f"docs/reference/api/{name}" for name in api_pages("")]
    rest = [path.name for path in sorted(ROOT.glob("*.md")) if path.name != "README.md"]
    titles = {**menu, "Public names by module": modules, "Repository": [*rest, *left]}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme + "".join(_toctree(title, pages) for title, pages in titles.items())


def _matches(name: str, pattern: str) -> bool:
    """Whether a page is directly in the pattern's folder."""
    return Path(name).parent == Path(pattern).parent and Path(name).match(pattern)


def _toctree(title: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", *pages, "```", ""])


def main() -> int:
    """Copy the pages and build the site. Return the exit status of Sphinx."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="resolve every link without writing the site")
    builder = "dummy" if parser.parse_args().check else "html"
    wanted = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sources()}
    wanted |= {f"docs/reference/api/{name}": text.encode() for name, text in api_pages("").items()}
    wanted["index.md"] = index().encode()
    del wanted["README.md"]
    for name, content in wanted.items():
        target = PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != content:  # Sphinx does not read unchanged files again
            target.write_bytes(content)
    for path in PAGES.rglob("*"):
        if path.is_file() and path.relative_to(PAGES).as_posix() not in wanted:
            path.unlink()
    command = [sys.executable, "-m", "sphinx", "-b", builder, "-c", str(ROOT / "docs"), "-d", str(BUILD / "doctrees")]
    command += ["--fresh-env"]  # pages that are not read again do not repeat their warnings
    command += ["--quiet", "--fail-on-warning", "--keep-going", str(PAGES), str(BUILD / "site")]
    return subprocess.run(command, timeout=_DEADLINE_SECONDS, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
