"""`--num-processes 2`: the same run in two processes, and what happens when one goes wrong."""

import json
import os
import pty
import signal
from contextlib import suppress

import psutil
import pytest
from run_files import RLHF, command, metrics, samples, start, write_run
from running import PATIENCE_SECONDS, ended, rlhf, wait_until

DDP = {"strategy": "torch-ddp", "train": {"episodes": 2, "prompts_per_episode": 6, "train_batch_size": 12}}
FLAGS = ("--num-processes", "2")


def begin(tmp_path, changes):
    """A long run of two processes: the command."""
    run = write_run(tmp_path, {**changes, "train": {**DDP["train"], "episodes": 100_000}})
    return rlhf("train", run, "--output", tmp_path / "run", *FLAGS)


def under_way(process, tmp_path):
    """Wait for an update; the processes of the ranks."""
    metrics_file = tmp_path / "run" / "metrics.jsonl"

    def updated():
        process.assert_runs()
        return metrics_file.exists() and metrics_file.stat().st_size

    wait_until(updated, "an update")
    return [each for each in process.processes() if "rlhf_strategies.launched" in " ".join(each.cmdline())]


def running_ones(ranks):
    return [each for each in ranks if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_two_processes_make_the_run_of_one(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def spread(rollouts):\n    return [sum(r.completion_ids) % 7 / 7 for r in rollouts]\n")
    changes = {**DDP, "eval": {"num_prompts": 5}, "rewards": [{"name": f"{reward}:spread"}]}
    run = write_run(tmp_path, changes)
    done = command("train", run, "--output", tmp_path / "two", *FLAGS, quick_ranks=True)
    assert done.returncode == 0, done.stderr
    one = start({**changes, "strategy": "single"}, tmp_path / "one")
    assert [line["sample_id"] for line in samples(tmp_path / "two")] == list(range(24))
    assert samples(tmp_path / "two")[:12] == samples(one.run_folder)[:12]
    for ours, theirs in zip(metrics(tmp_path / "two")[:1], metrics(one.run_folder)[:1], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["eval_before"] == one.summary["eval_before"]
    assert (tmp_path / "two/model/model.safetensors").is_file()


DIES_IN_ITS_FORWARD_PASS = """
import os, signal
from pathlib import Path
from transformers import LlamaForCausalLM

forward = LlamaForCausalLM.forward


def mortal(self, *args, **kwargs):
    if os.environ["RANK"] == "1" and Path(__file__).with_name("now").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, *args, **kwargs)


LlamaForCausalLM.forward = mortal


def spread(rollouts):
    return [sum(r.completion_ids) % 7 / 7 for r in rollouts]
"""


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_by_name(tmp_path):
    """Also when the other notices in a call of the wrapped model itself: here, when it gathers a block's weights."""
    reward = tmp_path / "reward.py"
    reward.write_text(DIES_IN_ITS_FORWARD_PASS)
    process = begin(tmp_path, {**DDP, "strategy": "fsdp", "rewards": [{"name": f"{reward}:spread"}]})
    with ended(process):
        ranks = under_way(process, tmp_path)
        assert len(ranks) == 2
        (tmp_path / "now").touch()
        _, err = process.finish()
        assert not running_ones(ranks)
    assert process.returncode == 1, err
    assert "error: rank 1: the training process of rank 1 (pid " in err and "was ended by SIGKILL" in err
    assert "gloo" not in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_ctrl_c_stops_all_processes_with_a_checkpoint(tmp_path):
    process = begin(tmp_path, DDP)
    with ended(process):
        ranks = under_way(process, tmp_path)
        process.send_signal(signal.SIGINT)
        out, err = process.finish()
        assert not running_ones(ranks)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    assert (tmp_path / "run/checkpoints/last").is_file()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"


@pytest.mark.usefixtures("sighup_not_ignored")
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_a_terminal_that_is_closed_asks_for_a_checkpoint(tmp_path, processes):
    """What the run says goes nowhere from then on, which ends nothing."""
    changes = {**DDP, "strategy": "torch-ddp" if processes > 1 else "single"}
    run = write_run(tmp_path, {**changes, "train": {**DDP["train"], "episodes": 100_000}})
    flags = ["train", str(run), "--output", str(tmp_path / "run"), "--num-processes", str(processes)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(RLHF, [RLHF, *flags])
    os.set_blocking(terminal, False)
    metrics_file = tmp_path / "run" / "metrics.jsonl"

    def updated():
        with suppress(BlockingIOError):  # nothing was said since
            os.read(terminal, 1 << 16)
        return metrics_file.exists() and metrics_file.stat().st_size

    wait_until(updated, "an update")
    os.close(terminal)
    process = psutil.Process(pid)
    try:
        code = process.wait(timeout=PATIENCE_SECONDS)
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    log = (tmp_path / "run/run.log").read_text()
    assert code == 130, log
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted", log
    assert (tmp_path / "run/checkpoints/last").is_file()
    assert "Traceback" not in log


@pytest.mark.slow
def test_input_that_is_wrong_in_every_process_leaves_nothing(tmp_path):
    run = write_run(tmp_path, {**DDP, "engine": {"max_cache_tokens": 64, "max_new_tokens": 128}})
    done = command("train", run, "--output", tmp_path / "run", *FLAGS)
    assert done.returncode == 2, done.stderr
    assert "engine.max_cache_tokens" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_hook_object_cannot_travel(tmp_path):
    from rlhf_core.errors import UserInputError

    class Hook:
        def rlhf_fit_start(self):
            """Never called."""

    with pytest.raises(UserInputError, match="Hook cannot be sent"):
        start(DDP, tmp_path / "run", num_processes=2, hooks=[Hook()])
    assert not (tmp_path / "run").exists()
