"""Runs with images: from a JSON Lines file or generated, through rewards, samples, checkpoints and refusals."""

import json
from importlib.util import find_spec
from io import BytesIO
from random import Random
from shutil import copytree

import pytest
import yaml
from PIL import Image

from rlhf_cli.main import run
from rlhf_core import train
from rlhf_core.components import TaskContext
from rlhf_core.errors import DataError
from rlhf_core.plugins import load
from rlhf_images import find_markers
from rlhf_pages import picture_names

TRAIN = {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4, "seed": 3}
RUN = {
    "model": {"path": "builtin:tiny-vision"},
    "prompts": {"name": "drawn-digits", "size": 12},
    "algorithm": {"name": "grpo", "kl_coef": 0.05},
    "rewards": [{"name": "exact-match"}],
    "engine": {"name": "hf", "max_new_tokens": 3},
    "optimizer": {"lr": 1e-3},
    "train": TRAIN,
    "logging": {"tensorboard": False},
}
GAME = """
class Game:
    def reset(self, task):
        return None

    def step(self, reply):
        return "Sure?", float(reply.turn), reply.turn == 1
"""
REWARD = """
from rlhf_images import open_images

def brightness(rollouts):
    return [open_images(rollout)[0].getpixel((0, 0))[0] / 255 for rollout in rollouts]
"""


def write_records(folder, count=8):
    (folder / "pictures").mkdir(exist_ok=True)
    lines = []
    for number in range(count):
        size = (20 + number, 32)
        picture = Image.frombytes("L", size, Random(number).randbytes(size[0] * size[1]))
        picture.save(folder / "pictures" / f"{number}.png")
        content = [{"type": "image", "image": f"pictures/{number}.png"}, {"type": "text", "text": "Which?"}]
        lines.append(json.dumps({"prompt": [{"role": "user", "content": content}], "answer": str(number)}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return {"name": "images", "of": {"name": "jsonl", "path": str(folder / "train.jsonl")}}


def metrics_of(folder):
    skipped = ("time/", "tokens_per_second/", "memory/", "reward_calls/")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(skipped)} for line in lines]


def test_a_run_on_a_file_with_pictures(tmp_path, with_plots):
    (tmp_path / "reward.py").write_text(REWARD)
    rewards = [*RUN["rewards"], {"name": f"{tmp_path}/reward.py:brightness"}]
    options = {**RUN, "prompts": write_records(tmp_path), "rewards": rewards}
    with with_plots():
        result = train(options, output=tmp_path / "run", trust=True)
    assert result.summary["status"] == "done"
    for line in metrics_of(tmp_path / "run"):
        assert line["rollout/logprob_gap_max"] < 1e-4 and line["reward/brightness"] > 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert all(len(find_markers(sample["prompt"])) == 1 for sample in samples)
    assert len({sample["prompt"] for sample in samples}) == 8
    names = picture_names(samples)
    assert {path.stem for path in (tmp_path / "run" / "images").iterdir()} == set(names) and len(names) == 8
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f'"{name}": "iVBOR' in page for name in names)  # base64 of PNG


def test_no_pictures_are_kept_without_samples(tmp_path):
    train({**RUN, "logging": {"tensorboard": False, "samples": "none"}}, output=tmp_path / "run")
    assert not (tmp_path / "run" / "images").exists()


@pytest.mark.slow
def test_the_digest_covers_the_pictures(tmp_path):
    digests = []
    for seed in (0, 0, 1):
        prompts = write_records(tmp_path)
        Image.new("L", (32, 32), seed).save(tmp_path / "pictures" / "0.png")
        folder = tmp_path / f"run-{len(digests)}"
        train({**RUN, "prompts": prompts, "train": {**TRAIN, "episodes": 1}}, output=folder)
        digests.append(json.loads((folder / "manifest.json").read_text())["data_digest"])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_metrics(tmp_path):
    options = {**RUN, "train": {**TRAIN, "episodes": 3}, "checkpoint": {"every_episodes": 1}}
    train(options, output=tmp_path / "whole")
    train({**options, "train": {**TRAIN, "episodes": 1}}, output=tmp_path / "part")
    train(options, output=tmp_path / "part", resume="auto")
    assert metrics_of(tmp_path / "part")[-1] == pytest.approx(metrics_of(tmp_path / "whole")[-1], abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "ppo"}},
        {"algorithm": {"name": "dpo"}, "rewards": []},
        {"model": {"path": "builtin:tiny-vision", "lora": {"r": 2}}},
        {"model": {"path": "builtin:tiny-vision", "lora": {"r": 2, "target_modules": ["language"]}}},
        {"model": {"path": "builtin:tiny-vision", "gradient_checkpointing": True}},
        {"engine": {"name": "hf", "max_new_tokens": 3, "top_k": 5}},
        {"prompts": {"name": "mixture", "sources": [{"name": "drawn-digits", "size": 9}]}},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_combinations(tmp_path, changes):
    run_file = {**RUN, **changes}
    if changes.get("algorithm", {}).get("name") == "dpo":
        run_file = {name: value for name, value in run_file.items() if name not in ("rewards", "engine")}
        run_file["train"] = {name: value for name, value in TRAIN.items() if name != "samples_per_prompt"}
    result = train(run_file, output=tmp_path / "run")
    assert result.summary["status"] == "done"


@pytest.mark.slow
def test_the_warm_start_and_then_grpo_from_its_folder(tmp_path):
    sft = {**RUN, "algorithm": {"name": "sft"}, "train": {**TRAIN, "samples_per_prompt": 1}}
    train({name: value for name, value in sft.items() if name not in ("rewards", "engine")}, output=tmp_path / "sft")
    again = {**RUN, "model": {"path": str(tmp_path / "sft" / "model")}}
    result = train(again, output=tmp_path / "grpo")
    assert result.summary["status"] == "done"
    assert run(["generate", "--model", str(tmp_path / "grpo" / "model"), "--prompt", "1", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompts": {"name": "images", "of": {"name": "nothing"}}}, "nothing"),
        ({"prompts": {"name": "images"}}, "of"),
        ({"engine": {"name": "http", "url": "http://127.0.0.1:1"}}, "does not pass images_pixels"),
        ({"model": {"path": "builtin:tiny-digits"}}, "is not known as a model that sees"),
        ({"model": {"path": "of/hub"}}, "is not known as a model that sees"),
        ({"model": {"path": "runs/of/another/model"}}, "runs/of/another/model"),
    ],
)
def test_what_is_refused(tmp_path, capsys, changes, problem):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, **changes}))
    assert run(["train", str(file), "--output", str(tmp_path / "run")]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_a_processor_that_needs_torchvision_is_one_line_with_what_to_install(folders, tmp_path, capsys):
    folder = tmp_path / "model"
    copytree(folders("llava"), folder)
    options = json.loads((folder / "preprocessor_config.json").read_text())
    options["image_processor_type"] = "Lfm2VlImageProcessor"  # transformers has no PIL form of it
    (folder / "preprocessor_config.json").write_text(json.dumps(options))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, "model": {"path": str(folder)}}))
    assert run(["train", str(file), "--dry-run"]) == 2
    (problem, hint) = capsys.readouterr().err.strip().splitlines()
    assert problem.endswith("has no PIL form, and torchvision is not installed")
    assert hint.strip() == "-> pip install torchvision, built for your version of torch"


def test_pictures_of_a_dataset_have_the_same_bounds(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "outside.png")
    bomb, good = BytesIO(), BytesIO()
    Image.new("L", (5000, 5000)).save(bomb, "PNG")
    Image.new("L", (30, 30)).save(good, "PNG")
    pictures = [
        {"bytes": good.getvalue(), "path": None},
        {"bytes": bomb.getvalue(), "path": None},
        {"bytes": None, "path": str(tmp_path / "outside.png")},
        {"bytes": None, "path": "http://127.0.0.1:9/x.png"},
    ]
    rows = {"prompt": ["Which?"] * 4, "answer": ["1"] * 4, "images": [[each] for each in pictures], "image": pictures}
    features = {"prompt": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    features["images"] = datasets.Sequence(datasets.Image())
    path = tmp_path / "data" / "rows.parquet"
    rows = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    # Written without `to_parquet`, which would fetch the address.
    pytest.importorskip("pyarrow.parquet").write_table(rows.data.table.cast(rows.features.arrow_schema), path)
    file = tmp_path / "run.yaml"
    prompts = {"name": "images", "of": {"name": "hf-dataset", "path": str(path)}}
    file.write_text(yaml.safe_dump({**RUN, "prompts": prompts}))
    assert run(["train", str(file), "--output", str(tmp_path / "run"), "--dry-run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "3 of 4 records are wrong" in error and "row 2: the image has 5000 x 5000 pixels" in error
    assert "row 3: the image" in error and "is outside of" in error and "row 4: the image is an address" in error


def test_an_environment_continues_a_prompt_with_an_image(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    environment = {"name": f"{tmp_path}/game.py:Game", "max_turns": 2}
    result = train({**RUN, "environment": environment, "rewards": []}, output=tmp_path / "run", trust=True)
    assert result.summary["status"] == "done"
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in metrics_of(tmp_path / "run"))
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {tuple(turn["role"] for turn in sample["turns"]) for sample in samples} == {
        ("policy", "environment", "policy")
    }
    assert all(len(find_markers(sample["prompt"])) == 1 for sample in samples)


@pytest.mark.parametrize("launch", [{"RANK": "1", "WORLD_SIZE": "2"}, {}], ids=["launched", "ray"])
def test_mixed_data_are_refused_before_a_run_of_several_processes(tmp_path, capsys, monkeypatch, launch):
    prompts = write_records(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "Which?", "answer": "1"}) + "\n")
    if launch:
        for name, value in {**launch, "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        reader = load("prompts", "images")
        config = reader.component.config.model_validate({"of": prompts["of"]})
        source = reader.build(config, TaskContext(seed=0, base_folder=tmp_path))
        assert [isinstance(record, DataError) for record in source.scan()] == [False] * 8 + [True]
        return
    file = tmp_path / "run.yaml"
    detached = {"strategy": {"name": "torch-ddp"}, "transport": {"name": "ray", "num_trainers": 2}}
    file.write_text(yaml.safe_dump({**RUN, "prompts": prompts, **detached}))
    assert run(["train", str(file), "--output", str(tmp_path / "run"), "--dry-run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "train.jsonl:9: its prompt lacks an image, which this run requires" in error


def test_a_broken_picture_is_an_error_of_its_line(tmp_path, capsys):
    prompts = write_records(tmp_path)
    (tmp_path / "pictures" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (tmp_path / "pictures" / "5.png").unlink()
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, "prompts": prompts}))
    assert run(["train", str(file), "--output", str(tmp_path / "run"), "--dry-run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "2 of 8 records are wrong" in error and "train.jsonl:4: the image is not of the formats" in error
    assert "train.jsonl:6: there is no image 'pictures/5.png'" in error
