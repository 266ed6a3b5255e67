"""Which kind loads a path, and inputs of the model in the rows of a forward."""

from dataclasses import replace

import pytest
import torch
import yaml

from rlhf_cli.main import run
from rlhf_core import Column, Columns
from rlhf_core.batching import collate
from rlhf_core.config.sections import ModelConfig
from rlhf_core.errors import DataError, PluginError, UserInputError
from rlhf_core.models.kinds import model_kind_for
from rlhf_core.runfolder.folder import RunFolder
from rlhf_forward.forward import model_rows
from rlhf_forward.rows import PaddedRows
from rlhf_models import CausalLM
from rlhf_passes.fast_passes import fast_passes
from rlhf_passes.packing import PackedRows
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_model, tiny_tokenizer
from rlhf_testing.runs import tiny_run
from rlhf_testing.samples import make_item

SOURCE = """
    from rlhf_core import Component, Section
    class NoOptions(Section):
        pass
    def claims(path, config):
        return path == "builtin:other" or config.get("model_type") == "other"
    other = Component("Another", NoOptions, "NAME_build:Other", claims=claims)
"""
BUILD = "from rlhf_models import CausalLM\nclass Other(CausalLM):\n    pass\n"
CONDITION = {"condition": Column(per="prompt", model_input=True)}


@pytest.fixture
def other(install):
    def add(name="acme", source=SOURCE, kind="other"):
        install(
            name, {"rlhf.models": {kind: f"{name}:other"}}, {name: source.replace("NAME", name), f"{name}_build": BUILD}
        )

    return add


def test_a_plugin_claims_a_path_or_a_config(other, tmp_path):
    other()
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    for path in ("builtin:other", str(tmp_path)):
        assert type(model_kind_for(ModelConfig(path=path))).__name__ == "Other"
    assert type(model_kind_for(ModelConfig(path="builtin:tiny-digits"))) is CausalLM
    with pytest.raises(UserInputError, match="the algorithm trains the kind 'sequence-classification'"):
        model_kind_for(ModelConfig(path="builtin:other"), "sequence-classification")


@pytest.mark.parametrize("kind", ["other", "second"])
def test_two_that_claim_a_path_are_named(other, kind, tmp_path, capsys):
    other()
    other("rival", kind=kind)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny_run({"model": {"path": "builtin:other"}})))
    assert run(["train", str(file), "--output", str(tmp_path / "run")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert '"other" (acme 1.2.3)' in told and f'"{kind}" (rival 1.2.3)' in told


def test_a_broken_one_hurts_no_other(other, caplog):
    other(source=SOURCE.replace("return path", "return 1 / 0, path"))
    assert type(model_kind_for(ModelConfig(path="builtin:tiny-digits"))) is CausalLM
    assert 'kind of model "other" (acme 1.2.3) is ignored: division by zero' in caplog.text


def test_a_name_without_a_plugin_is_an_error():
    with pytest.raises(PluginError, match="unheard-of"):
        model_kind_for(ModelConfig(path="builtin:tiny-digits"), "unheard-of")


def test_a_resume_without_the_owner_says_what_to_install(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_manifest({"owners": {"models": {"other": "acme 1.2.3"}}})
    folder.write_config(tiny_run({"model": {"path": "builtin:other"}}))
    assert run(["train", "--resume", str(folder.path)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "the run has the kind of model other of acme 1.2.3, which is not installed" in told
    assert "pip install acme==1.2.3" in told


@pytest.mark.slow
def test_the_command_knows_the_kinds(other, capsys):
    other()
    assert run(["plugins", "show", "models/other"]) == 0
    assert "acme 1.2.3" in capsys.readouterr().out
    assert run(["plugins", "check", "other"]) == 0


def test_a_batch_with_inputs_is_not_packed():
    model = tiny_model()
    items = [make_item(sample, num_actions=2 + sample) for sample in range(3)]
    fed = [replace(item, columns=Columns({"condition": [float(i)] * 2}, CONDITION)) for i, item in enumerate(items)]
    with fast_passes(model):
        assert isinstance(model_rows(model, collate(items)), PackedRows)
        rows = model_rows(model, collate(fed))
    assert isinstance(rows, PaddedRows)
    assert torch.equal(rows.inputs["condition"], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))


def test_inputs_of_different_shapes_are_padded_in_every_dimension():
    kinds = {"pixels": Column(per="prompt", fill=-1.0, model_input=True), "note": Column(per="prompt")}
    pixels = [torch.ones(2, 3), torch.ones(1, 4), torch.ones(0, 4)]
    items = [replace(make_item(i), columns=Columns({"pixels": p, "note": i}, kinds)) for i, p in enumerate(pixels)]
    batch = collate(items).columns["pixels"]
    assert batch[0].tolist() == [[1, 1, 1, -1], [1, 1, 1, -1]] and batch[1].tolist() == [[1] * 4, [-1] * 4]
    assert batch.shape == (3, 2, 4) and (batch[2] == -1).all()
    assert list(collate(items, with_inputs=False).columns) == ["note"]


def test_only_columns_per_prompt_are_inputs():
    with pytest.raises(PluginError, match="a column per token is a model_input"):
        Column(model_input=True)


class Records(list):
    columns = {"condition": Column(per="prompt", dtype="int64", model_input=True), "note": Column(per="prompt")}


def test_a_source_gives_columns_in_its_records():
    stream = prompt_stream(Records([{"prompt": "1>", "condition": [1, 2], "note": 0.5}]), tiny_tokenizer(), seed=0)
    columns = stream.prompt(0).columns
    assert columns["condition"].tolist() == [1, 2] and columns["note"] == 0.5
    assert list(columns.model_inputs) == ["condition"]


def test_a_record_without_its_column_is_named():
    with pytest.raises(DataError, match="the columns of its prompt cannot be read: 'note'"):
        prompt_stream(Records([{"prompt": "1>", "condition": [1]}]), tiny_tokenizer(), seed=0)
