"""A hub name without a network is an error at once, and works with one or from the cache."""

from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread

import pytest
from huggingface_hub import constants

from rlhf_core.components import TaskContext
from rlhf_core.config.sections import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_data.config import HfDatasetConfig
from rlhf_data.hf_dataset import build
from rlhf_models import check_hub, files, load_tokenizer
from rlhf_plan.meta import meta_model

NAME = "no-such-owner/no-such-model"


@pytest.mark.parametrize("load", [load_tokenizer, meta_model])
def test_an_unreachable_hub_is_told_before_any_file_is_asked_for(no_hub, load):
    with pytest.raises(UserInputError, match="neither a local folder nor in the cache.*does not answer") as caught:
        load(ModelConfig(path=NAME))
    assert caught.value.where == "model.path"
    assert "use a folder on this machine" in caught.value.hint


@pytest.fixture
def load_prompts(monkeypatch, tmp_path):
    """Builds the prompt source `hf-dataset` on a hub name; `datasets` has an empty cache in `tmp_path`."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: [{"prompt": "1"}])
    return lambda **options: build(HfDatasetConfig(path="Owner/MyPrompts", **options), TaskContext(0, tmp_path))


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_of_an_unreachable_hub_are_an_error_before_any_is_loaded(no_hub, load_prompts, streaming):
    with pytest.raises(UserInputError, match="'Owner/MyPrompts' is neither a local folder nor in the cache") as caught:
        load_prompts(streaming=streaming)
    assert caught.value.where == "prompts.path"


def test_prompts_in_the_cache_and_offline_mode_need_no_answer(no_hub, load_prompts, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_prompts()[0] == {"prompt": "1"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "Owner___my_prompts").mkdir()  # as `datasets` names it
    assert load_prompts()[0] == {"prompt": "1"}


def test_a_name_that_never_resolves_does_not_hold_up_the_error(no_hub, monkeypatch):
    over = Event()
    monkeypatch.setattr(files, "_PROBE_SECONDS", 0.01)
    monkeypatch.setattr(files, "_probe_hub", lambda answers: over.wait(60))
    with pytest.raises(UserInputError, match="does not answer"):
        check_hub(NAME, where="model.path")
    over.set()


@contextmanager
def answering(monkeypatch, status, body=b""):
    """A hub that gives this answer to every request."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"0"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        files = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(30)


def test_any_answer_of_the_hub_will_do(no_hub, monkeypatch):
    with answering(monkeypatch, 403):
        check_hub(NAME, where="model.path")


def test_the_layers_of_a_model_on_the_hub_are_checked_before_transformers_reads_it(no_hub, monkeypatch):
    with (
        answering(monkeypatch, 200, b'{"num_hidden_layers": 1000000000}'),
        pytest.raises(UserInputError, match=r"num_hidden_layers.*between 0 and 2,000 layers"),
    ):
        check_hub(NAME, where="model.path")


def test_a_cached_model_and_offline_mode_need_no_answer(no_hub, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_hub(NAME, where="model.path")  # transformers itself fails at once
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(files, "_probe_hub", lambda answers: pytest.fail("no request is needed"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *name: str(tmp_path / "config.json"))
    check_hub(NAME, where="model.path")
