"""The engine over the real server of vLLM's CPU build: the contract, a server that is killed, and a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from generation_server import save_base
from run_files import start
from running import free_port, wait_until

from rlhf_testing.contracts import EngineContract
from rlhf_testing.contracts.engine import Bench, make_requests
from rlhf_testing.runs import tiny_run
from rlhf_testing.tiny import contract_policy, contract_tokenizer

pytest.importorskip("vllm", reason="needs vLLM: make setup-vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FLAGS = [
    *("--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--generation-config", "vllm"),
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "64"),
]


class RealServer:
    """vLLM's server, started as the README says. The command of the CPU build only starts as a module."""

    def __init__(self, model: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._model, self._log = model, log
        self.start()

    def start(self) -> None:
        port = self.url.rpartition(":")[2]
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--model", str(self._model), "--port", port, *FLAGS),
                ],
                env=os.environ | settings | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._is_up, "vLLM's server", every_seconds=1.0)

    def kill(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-3000:]
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("vllm")
    server = RealServer(save_base(folder / "model", hidden_size=64), folder / "log")
    try:
        yield server
    finally:
        server.kill()


class TestRealVllm(EngineContract):
    plugin = "http"
    hidden_size = 64  # the CPU build's attention wants heads of 32 at least

    @pytest.fixture(scope="class")
    @classmethod
    def given(cls, folder: Path, real_server: RealServer) -> dict[str, Any]:
        return {"url": real_server.url, "weights_folder": str(folder)}


del EngineContract


def test_a_killed_server_gets_the_weights_again(real_server, make_engine):
    module = contract_policy(hidden_size=64).eval()
    real_server.kind = "vllm"
    engine = make_engine(real_server, module, patience_seconds=600.0)
    requests = make_requests(6)
    bench = Bench(engine, module, module, contract_tokenizer())
    before = bench.answers(requests)
    real_server.kill()
    real_server.start()
    after = bench.answers(requests)
    assert {key: each.token_ids for key, each in after.items()} == {key: each.token_ids for key, each in before.items()}
    assert bench.gap_of(requests, after, 1.0) < 1e-4


@pytest.mark.usefixtures("no_plots")
def test_a_run_learns_from_its_samples(real_server, tmp_path):
    model = tmp_path / "model"
    contract_policy(hidden_size=64).save_pretrained(model)
    contract_tokenizer().save_pretrained(model)
    changes = {
        "model": {"path": str(model)},
        "prompts": {"name": "sort-digits", "num_digits": 3, "size": 64, "max_prompt_tokens": 16},
        "engine": {"name": "http", "url": real_server.url, "max_new_tokens": 6},
    }
    run = start(changes, tmp_path / "run").run_folder
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert tiny_run()["train"]["episodes"] * 2 == len(lines)
    assert max(line["rollout/logprob_gap_max"] for line in lines if "rollout/logprob_gap_max" in line) < 1e-3
