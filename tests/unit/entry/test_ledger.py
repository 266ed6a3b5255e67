"""Who takes a run folder, and what the summary of a running run records of its score before training."""

import pytest

from rlhf_core.entry import ledger
from rlhf_core.entry.ledger import RunLedger
from rlhf_core.errors import UserInputError
from rlhf_core.runfolder import RunFolder


def test_a_running_run_has_its_first_score_in_its_summary(tmp_path):
    with RunFolder.take(tmp_path / "run") as folder:
        run = RunLedger(folder)
        run.start()
        before = folder.read_json(folder.summary)
        run.rlhf_eval_end(step=0, metrics={"eval/score": 0.25})
        assert folder.read_json(folder.summary) == before | {"eval_before": 0.25}
        run.rlhf_eval_end(step=4, metrics={"eval/score": 0.75})
        assert folder.read_json(folder.summary)["eval_before"] == 0.25
        summary = run.end(RuntimeError())
        assert (summary["status"], summary["eval_before"], summary["eval_after"]) == ("failed", 0.25, None)
        assert run.end(RuntimeError()) == summary


def test_a_checkpoint_goes_on_in_the_folder_of_its_run_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "find_checkpoint", lambda resume, path: tmp_path / "step-2")
    with pytest.raises(UserInputError, match="does not contain a run"), RunLedger.take(tmp_path / "other", "step-2"):
        raise AssertionError
    assert not (tmp_path / "other").exists()
