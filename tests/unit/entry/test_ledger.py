"""What the summary of a running run records of its score before training."""

from rlhf_core.entry.ledger import RunLedger
from rlhf_core.runfolder import RunFolder


def test_a_running_run_has_its_first_score_in_its_summary(tmp_path):
    with RunFolder.take(tmp_path / "run") as folder:
        ledger = RunLedger(folder)
        ledger.start()
        before = folder.read_json(folder.summary)
        ledger.rlhf_eval_end(step=0, metrics={"eval/score": 0.25})
        assert folder.read_json(folder.summary) == before | {"eval_before": 0.25}
        ledger.rlhf_eval_end(step=4, metrics={"eval/score": 0.75})
        assert folder.read_json(folder.summary)["eval_before"] == 0.25
        summary = ledger.end(RuntimeError())
        assert (summary["status"], summary["eval_before"], summary["eval_after"]) == ("failed", 0.25, None)
        assert ledger.end(RuntimeError()) == summary
