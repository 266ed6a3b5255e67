"""Only rlhf-web serves and calls HTTP. Other distributions import starlette's requests, responses and routes."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "rlhf_core", ROOT / "cli" / "rlhf_cli", *ROOT.glob("*/*/src/*"), *ROOT.glob("plugins/*/*/src/*")]
WEB = "rlhf_web"
SERVERS = {"uvicorn", "h11", "hypercorn", "http.server", "socketserver", "wsgiref", "aiohttp", "flask", "fastapi"}
CLIENTS = {"httpx", "httpx2", "requests", "urllib.request", "urllib3", "http.client"}
ROOTS = {name.partition(".")[0] for name in SERVERS | CLIENTS}


def http_modules(package: Path) -> set[str]:
    """The modules of `SERVERS` and `CLIENTS` that the files of a package import, anywhere in them."""
    names: set[str] = set()
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source if any(name in source for name in ROOTS) else "")):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {module for module in SERVERS | CLIENTS if any(f"{name}.".startswith(f"{module}.") for name in names)}


def test_one_library_serves_and_calls() -> None:
    found = {package.name: modules for package in PACKAGES if (modules := http_modules(package))}
    assert found == {WEB: {"uvicorn", "h11", "httpx2"}}
