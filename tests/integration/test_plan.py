"""What a run is said to need, against what it used."""

import json

import pytest
from run_files import command, write_run

from rlhf_testing.models import tiny_model, tiny_tokenizer
from rlhf_testing.runs import tiny_run

TRAIN = {"episodes": 1, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model large enough for its memory to be seen: 19 million parameters."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer("0123456789>,")
    tiny_model(tokenizer, hidden_size=512, num_layers=6, num_heads=8, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def plan(run, *flags):
    done = command("plan", run, "--json", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_memory_of_a_run_is_what_the_plan_said(tmp_path, model):
    run = write_run(tmp_path, {"model": {"path": model, "device": "cpu"}, "train": TRAIN})
    said = plan(run)
    done = command("train", run, "--output", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
    used = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["memory/peak_bytes"]
    (process,) = said["processes"]
    assert process["bytes_by_part"]["policy weights"] == 4 * said["num_parameters"]
    assert 0.7 * used < process["total_bytes"] < 1.4 * used, f"said {process}, used {used / 1e6:.0f} MB"


@pytest.mark.slow
def test_shards_makers_and_adapters_change_what_is_needed(tmp_path, model):
    run = write_run(tmp_path, {"model": {"path": model, "device": "cpu"}, "train": TRAIN})
    (alone,) = plan(run)["processes"]
    (sharded,) = plan(run, "--strategy", "fsdp", "--num-processes", "4")["processes"]
    assert sharded["bytes_by_part"]["policy optimizer"] * 4 == alone["bytes_by_part"]["policy optimizer"]
    assert sharded["bytes_by_part"]["policy copy of the engine"] == alone["bytes_by_part"]["policy weights"]
    trainer, maker = plan(run, "--transport", "ray", "--set", "transport.num_makers=2")["processes"]
    assert (trainer["kind"], maker["kind"], maker["count"]) == ("trainer", "maker", 2)
    assert "policy optimizer" not in maker["bytes_by_part"]
    (half,) = plan(run, "--set", "model.dtype=bfloat16")["processes"]
    assert half["bytes_by_part"]["policy weights"] * 2 == alone["bytes_by_part"]["policy weights"]
    # float32 masters beside the two moments
    assert half["bytes_by_part"]["policy optimizer"] * 2 == alone["bytes_by_part"]["policy optimizer"] * 3
    (narrow,) = plan(run, "--set", "engine.max_batch_size=2")["processes"]  # of eight answers in all
    assert narrow["bytes_by_part"]["key-value cache"] * 4 == alone["bytes_by_part"]["key-value cache"]
    adapted = plan(run, "--set", "model.lora.r=4")
    assert adapted["num_trainable"] < 0.05 * adapted["num_parameters"]
    assert "reference weights" not in adapted["processes"][0]["bytes_by_part"]
    parts = adapted["processes"][0]["bytes_by_part"]
    assert parts["critic optimizer"] < 0.1 * alone["bytes_by_part"]["critic optimizer"]
    (packed,) = plan(run, "--set", "model.lora.r=4", "--set", "model.quantize=nf4")["processes"]
    for part in ("policy weights", "critic weights"):  # half a byte and a scale, except for embeddings and adapter
        assert 0.13 < packed["bytes_by_part"][part] / parts[part] < 0.2


def test_a_plan_for_a_person_and_for_a_dataset(tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps(tiny_run({"algorithm": {"name": "sft"}, "rewards": None})))
    done = command("plan", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "335,520 parameters" in done.stdout
    assert "policy optimizer" in done.stdout and "total" in done.stdout
    assert "rollout" not in done.stdout
    broken = command("plan", tmp_path / "run.yaml", "--model", "no-such-folder")
    assert broken.returncode == 2
