"""What the summary of a run that goes on says of its score before training."""

from rlhf_core.entry.run_record import FirstScore
from rlhf_core.runfolder import RunFolder


def test_a_run_that_goes_on_has_its_first_score_in_its_summary(tmp_path):
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_running()
        before = folder.read_json(folder.summary)
        first = FirstScore(None, folder)
        first.rlhf_eval_end(step=0, metrics={"eval/score": 0.25})
        assert folder.read_json(folder.summary) == before | {"eval_before": 0.25}
        first.rlhf_eval_end(step=4, metrics={"eval/score": 0.75})
        assert first.score == folder.read_json(folder.summary)["eval_before"] == 0.25
