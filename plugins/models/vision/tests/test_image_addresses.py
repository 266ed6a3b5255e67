"""Images at addresses of allowed hosts: downloaded once, part of the digest, and errors of their lines."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlhf_core.components import TaskContext
from rlhf_core.errors import DataError
from rlhf_core.plugins import load

served: dict[str, bytes] = {}
asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked.append(self.path)
        body = served.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served.clear()
    asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def png(color: int) -> bytes:
    file = BytesIO()
    Image.new("L", (6, 4), color).save(file, "PNG")
    return file.getvalue()


def source_of(folder: Path, urls: list[str], **options: Any) -> Any:
    lines = [json.dumps({"prompt": "Which?", "image": url, "answer": "1"}) for url in urls]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    reader = load("prompts", "images")
    config = reader.component.config.model_validate({"of": {"name": "jsonl", "path": "train.jsonl"}, **options})
    return reader.build(config, TaskContext(seed=0, base_folder=folder))


def test_each_image_is_downloaded_once(address: str, tmp_path: Path) -> None:
    urls = [f"{address}/{number}.png?key=secret" for number in range(30)]
    served.update({f"/{number}.png?key=secret": png(number) for number in range(30)})
    for _ in range(2):
        source = source_of(tmp_path, urls, allow_hosts=["127.0.0.1"])
        records = list(source.scan())
        assert [record["images"][0].open().getpixel((0, 0))[0] for record in records] == list(range(30)), "in order"
        assert source[7]["images"] == records[7]["images"]
        assert "secret" not in json.dumps(records)
    assert len(asked) == 30


def test_records_with_the_same_image_download_it_once(address: str, tmp_path: Path) -> None:
    served["/same.png"] = png(1)
    assert len(list(source_of(tmp_path, [f"{address}/same.png"] * 30, allow_hosts=["127.0.0.1"]).scan())) == 30
    assert asked == ["/same.png"]


def test_an_image_of_the_cache_is_refused_if_its_host_is_no_longer_allowed(address: str, tmp_path: Path) -> None:
    served["/kept.png"] = png(1)
    assert source_of(tmp_path, [f"{address}/kept.png"], allow_hosts=["127.0.0.1"])[0]["images"]
    (error,) = source_of(tmp_path, [f"{address}/kept.png"], allow_hosts=["images.example.org"]).scan()
    assert "the host 127.0.0.1 is not allowed" in str(error)


def test_what_cannot_be_downloaded_is_an_error_of_its_line_and_is_not_kept(address: str, tmp_path: Path) -> None:
    served.update({"/good": png(1), "/page": b"<html>", "/large": b"x" * 2000})
    urls = [f"{address}/{name}" for name in ("good", "none", "page", "large")] + ["http://localhost:1/x"]
    limits = {"max_bytes": 1000}
    found = list(source_of(tmp_path, urls, allow_hosts=["127.0.0.1"], limits=limits).scan())
    problems = [str(each) if isinstance(each, DataError) else None for each in found]
    expected = [None, "status 404", "not of the formats", "more than 1,000 bytes", "the host localhost is not allowed"]
    for problem, part in zip(problems, expected, strict=True):
        assert (problem is None) if part is None else part in str(problem)
    assert len(list((tmp_path / "cache" / "rlhf" / "images").iterdir())) == 1


def test_addresses_are_refused_unless_their_host_is_allowed(address: str, tmp_path: Path) -> None:
    (error,) = source_of(tmp_path, [f"{address}/good"]).scan()
    assert "the image is an address" in str(error) and "allow its host" in str(error)
    assert not asked


def test_a_full_cache_loses_what_was_used_longest_ago(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(png(0))
    monkeypatch.setattr("rlhf_vision.downloads.MAX_CACHE_BYTES", 10 * size)
    served.update({f"/{number}": png(number) for number in range(12)})
    source = source_of(tmp_path, [f"{address}/{number}" for number in range(12)], allow_hosts=["127.0.0.1"])
    cache = tmp_path / "cache" / "rlhf" / "images"
    found = []
    for number in range(12):
        source[0]["images"]  # stays in use
        found.append(source[number]["images"][0])
        for age, path in enumerate(sorted(cache.iterdir(), key=lambda each: each.stat().st_mtime)):
            os.utime(path, (age, age))  # file systems have coarse clocks
        assert sum(path.stat().st_size for path in cache.iterdir()) <= 10 * size
    assert asked.count("/0") == 1 and len(asked) == 12
    assert found[1].open().getpixel((0, 0)) == (1, 1, 1)
    assert asked.count("/1") == 2, "it was removed, and is downloaded again"


@pytest.mark.slow
def test_a_failed_connection_says_that_proxies_are_not_used(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    urls = ["http://127.0.0.1:1/x", f"{address}/none"]
    lost, missing = map(str, source_of(tmp_path, urls, allow_hosts=["127.0.0.1"]).scan())
    assert "HTTPS_PROXY is set, but proxies are not used" in lost and "HTTPS_PROXY" not in missing


def test_observations_and_agents_may_use_the_same_hosts(address: str, tmp_path: Path) -> None:
    served["/good"] = png(1)
    options = {"of": {"name": "jsonl", "path": "train.jsonl"}}
    config = load("prompts", "images").component.config
    assert config.model_validate(options).downloads() is None
    fetch = config.model_validate({**options, "allow_hosts": ["127.0.0.1"]}).downloads()
    assert fetch(f"{address}/good") == png(1)
