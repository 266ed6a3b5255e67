"""The jobs of `examples/cluster`: a Slurm job that is signaled, requeued and done, and the commands of a SkyPilot task.

Slurm's commands are stand-ins.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_files import lines, write_run
from running import MARK, PATIENCE_SECONDS, free_port, kill, marked, wait_until

pytestmark = pytest.mark.usefixtures("no_plots")
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
SCRIPT = FOLDER / "slurm.sbatch"
GATED = """
import time
from pathlib import Path

folder = Path(__file__).parent


def gated(rollouts):
    \"\"\"Scores the first episode, and later ones once the file `go` exists.\"\"\"
    deadline = time.monotonic() + 600
    while (folder / "run" / "metrics.jsonl").exists() and not (folder / "go").exists():
        if (folder / "run" / "metrics.jsonl").stat().st_size == 0:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [0.0] * len(rollouts)
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$(dirname "$0")/../scontrol.log"
if [ "$1" = show ]; then printf '%s\\n' localhost other; fi
"""
SRUN = """#!/bin/bash
# Starts the command once for each of the two nodes of the job, and waits for both.
while [ "$1" != torchrun ]; do shift; done
"$@" & first=$!
"$@" & second=$!
wait $first; code=$?
wait $second || code=$?
exit $code
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a run file and Slurm's commands."""
    (tmp_path / "reward.py").write_text(GATED)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "scontrol.log").touch()
    return tmp_path


def submit(site: Path, run: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the script as Slurm does, with the same arguments after each requeue."""
    path = f"{site / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "7", "PATH": path, MARK: str(site), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        ["bash", str(SCRIPT), str(run), str(site / "run"), *arguments],
        env={**os.environ, **job},
        cwd=site,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("strategy", "environment"),
    [
        ("single", {}),
        ("torch-ddp", {"SLURM_GPUS_ON_NODE": "2"}),
        ("torch-ddp", {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}),
    ],
    ids=["one process", "two processes", "two nodes"],
)
@pytest.mark.slow
def test_a_job_that_is_signaled_is_requeued_and_its_next_execution_finishes_the_run(
    site: Path, strategy: str, environment: dict[str, str]
) -> None:
    sizes = {"episodes": 3, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 8}
    rewards = [{"name": f"{site / 'reward.py'}:gated", "timeout_seconds": 600}]
    changes = {"train": sizes, "checkpoint": {"every_episodes": None}, "rewards": rewards, "strategy": strategy}
    changes |= {"hooks": {"disable": ["report"]}}
    run = write_run(site, changes)
    metrics, summary, log = site / "run" / "metrics.jsonl", site / "run" / "summary.json", site / "scontrol.log"
    environment = {**environment, "MASTER_PORT": str(free_port())}
    try:
        job = submit(site, run, **environment)

        def one_episode() -> bool:
            assert job.poll() is None, job.communicate()[0]
            return metrics.exists() and len(lines(metrics)) == 1

        wait_until(one_episode, "the first episode")
        job.send_signal(signal.SIGUSR1)  # to the script alone, by `B:`
        (site / "go").touch()
        output, _ = job.communicate(timeout=PATIENCE_SECONDS)
        assert job.returncode != 0, output
        assert "requeue 7" in log.read_text(), output
        stopped = json.loads(summary.read_text())
        assert (stopped["status"], stopped["stopped"]["by"]) == ("interrupted", "signal")
        assert len(lines(metrics)) < 3

        log.write_text("")
        job = submit(site, run, **environment)
        output, _ = job.communicate(timeout=PATIENCE_SECONDS)
        assert job.returncode == 0, output
    finally:
        kill(lambda: marked(str(site)))
    assert json.loads(summary.read_text())["status"] == "done"
    assert [line["episode"] for line in lines(metrics)] == [0, 1, 2]
    assert "requeue" not in log.read_text()


def test_a_job_whose_run_has_reached_its_limit_is_requeued_and_one_that_a_person_stopped_is_not(site: Path) -> None:
    (site / "run").mkdir()
    (site / "bin" / "rlhf").write_text('#!/bin/bash\necho "$@" > arguments\ncp new.json run/summary.json\nexit 130\n')
    (site / "bin" / "rlhf").chmod(0o755)
    for by, log in {"train.max_hours": "requeue 7\n", "control": "", "signal": ""}.items():
        (site / "scontrol.log").write_text("")
        summary = {"status": "interrupted", "stopped": {"by": by, "reason": "x"}}
        (site / "new.json").write_text(json.dumps(summary, indent=2))
        job = submit(site, site / "run.yaml", "--set", "train.max_hours=1")
        output, _ = job.communicate(timeout=PATIENCE_SECONDS)
        assert (job.returncode, (site / "scontrol.log").read_text()) == (130, log), output
    given = (site / "arguments").read_text().split()
    assert given == [
        *("train", str(site / "run.yaml"), "--output", str(site / "run"), "--resume", "auto"),
        *("--set", "train.max_hours=1", "--num-processes", "1"),
    ]


def test_a_job_whose_run_cannot_begin_is_not_requeued_because_of_the_job_before(site: Path) -> None:
    (site / "run").mkdir()
    (site / "bin" / "rlhf").write_text("#!/bin/bash\nexit 2\n")
    (site / "bin" / "rlhf").chmod(0o755)
    before = {"status": "interrupted", "stopped": {"by": "train.max_hours", "reason": "x"}}
    (site / "run" / "summary.json").write_text(json.dumps(before, indent=2))
    job = submit(site, site / "run.yaml")
    output, _ = job.communicate(timeout=PATIENCE_SECONDS)
    assert (job.returncode, (site / "scontrol.log").read_text()) == (2, ""), output


def test_the_script_has_the_directives_that_it_relies_on() -> None:
    checked = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    text = SCRIPT.read_text()
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--signal=B:USR1@300", "--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= set(directives)
    first_command = next(line for line in text.splitlines() if line and not line.startswith("#"))
    assert text.index(first_command) > text.rindex("#SBATCH")  # Slurm ignores directives after the first command
    usage = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert (usage.returncode, usage.stderr[:13]) == (2, "usage: sbatch")


ECHO = '#!/bin/bash\nfor each in "$(basename "$0")" "$@"; do echo "$each" >> arguments; done\n'


@pytest.mark.parametrize(
    ("nodes", "command"),
    [
        ("1", ["rlhf", "train", "--num-processes 4"]),
        ("2", ["torchrun", "--nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr 10.0.0.1", "-m rlhf_cli train"]),
    ],
)
def test_a_skypilot_task_continues_the_run_on_its_volume(tmp_path: Path, nodes: str, command: list[str]) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    volume = yaml.safe_load((FOLDER / "skypilot-volume.yaml").read_text())
    known = {"name", "workdir", "num_nodes", "resources", "volumes", "envs", "setup", "run"}
    assert set(task) == known and list(task["volumes"].values()) == [volume["name"]]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [130]
    commands = tmp_path / "rlhf" / "bin"
    commands.mkdir(parents=True)
    for name in ("rlhf", "torchrun"):
        (commands / name).write_text(ECHO)
        (commands / name).chmod(0o755)
    variables = {
        **task["envs"],
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "SKYPILOT_NUM_NODES": nodes,
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    done = subprocess.run(["bash", "-c", task["run"]], env=variables, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0
    arguments = " ".join((tmp_path / "arguments").read_text().split())
    assert all(part in arguments for part in command)
    assert "train run.yaml --output /runs/first --resume auto" in arguments
    checked = subprocess.run(["bash", "-n", "-c", task["setup"]], capture_output=True, timeout=60, check=False)
    assert checked.returncode == 0
