"""A run is checked as a whole: plugins, options, and what sections ask of each other."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_cli.run_schema import run_schema
from rlhf_core.config.load import load_run
from rlhf_core.config.processes import check_processes
from rlhf_core.config.resolve import resolve
from rlhf_core.config.sections import EngineConfig, RewardEntry
from rlhf_core.errors import ConfigError
from rlhf_core.types import SamplingParams

pytestmark = pytest.mark.usefixtures("fake_plugins")


def problems_of(run, *overrides):
    with pytest.raises(ConfigError) as error:
        resolve(load_run(run, overrides), where="run.yaml")
    return str(error.value)


def test_every_section_is_selected_and_typed(fake_run):
    resolved = resolve(fake_run)
    assert resolved.algorithm.label == 'algorithm "fake-learn" (fake-plugins 1.2.3)'
    assert resolved.algorithm.config.clip_eps == 0.3
    assert resolved.strategy.config.precision == "auto"
    assert isinstance(resolved.engine.config, EngineConfig)
    assert resolved.sampling == SamplingParams(max_new_tokens=5)
    assert resolved.prompts.config.max_prompt_tokens == 16
    assert resolved.prompts.config.path == "p.jsonl"
    assert resolved.run.eval is None
    assert not resolved.eval_prompts
    (reward,) = resolved.rewards
    entry = reward.typed(RewardEntry)
    assert (entry.label, entry.weight, entry.timeout_seconds) == ("fake-shout", 0.5, 60.0)
    assert reward.config.loudness == 1


def test_reward_policy_and_options_are_told_apart(fake_run):
    entry = {"name": "fake-shout", "label": "loud", "timeout_seconds": 2, "on_failure": "drop", "loudness": 7}
    (reward,) = resolve({**fake_run, "rewards": [entry]}).rewards
    entry = reward.typed(RewardEntry)
    assert (entry.label, entry.timeout_seconds, entry.on_failure) == ("loud", 2.0, "drop")
    assert reward.recipe(entry, None).options == {"loudness": 7, "word": "hey"}


def test_evaluation_may_have_prompts_of_its_own(fake_run):
    evaluation = {"num_prompts": 4, "prompts": {"name": "fake-lines", "path": "held.jsonl"}}
    resolved = resolve({**fake_run, "eval": evaluation})
    assert resolved.eval_prompts[None].config.path == "held.jsonl"
    assert resolve(resolved.to_mapping()).eval_prompts == resolved.eval_prompts


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    episodes=st.integers(1, 10**6),
    prompts=st.integers(1, 300),
    samples=st.integers(1, 8),
    lr=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    logged=st.sampled_from(["all", "none"]) | st.integers(1, 99),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    lora=st.none() | st.fixed_dictionaries({"r": st.integers(1, 64)}),
    weight=st.floats(-5, 5),
)
def test_a_resolved_run_resolves_to_itself(fake_run, episodes, prompts, samples, lr, betas, logged, stop, lora, weight):
    run = load_run(
        fake_run,
        [
            ("train", {"episodes": episodes, "prompts_per_episode": prompts, "samples_per_prompt": samples}),
            ("optimizer", {"lr": lr, "betas": betas}),
            ("logging.samples", logged),
            ("engine.stop", stop),
            ("model.lora", lora),
            ("rewards.0.weight", weight),
        ],
    )
    first = resolve(run)
    again = resolve(first.to_mapping())
    assert again.to_mapping() == first.to_mapping()
    assert again.run == first.run
    assert first.run.train.train_batch_size == min(64, prompts * samples)


def test_the_resolved_mapping_has_every_section_in_order(fake_run):
    mapping = resolve(fake_run).to_mapping()
    assert list(mapping) == [
        "model",
        "prompts",
        "eval",
        "algorithm",
        "optimizer",
        "strategy",
        "rewards",
        "reward_scaling",
        "engine",
        "transport",
        "train",
        "checkpoint",
        "logging",
        "hooks",
        "guards",
    ]
    shared = {"max_prompt_tokens": 16, "too_long": "skip", "duplicates": None, "filter": None}
    assert mapping["prompts"] == {"name": "fake-lines", **shared, "path": "p.jsonl"}


def test_several_problems_are_reported_together(fake_run):
    text = problems_of(
        fake_run,
        "optimizer.lrr=1",
        "train.episodes=0",
        "algorithm.clip_epz=0.1",
        "engine.temperature=hot",
        "modle.path=x",
        "rewards.0.loudnes=2",
        "logging.samples=some",
        "prompts.max_prompt_token=2",
        "model.lora.rank=2",
    )
    assert text.startswith("run.yaml: 9 problems")
    for line in (
        'optimizer.lrr: unknown key; did you mean "lr"?',
        "train.episodes: should be greater than or equal to 1 (given 0)",
        'algorithm.clip_epz: unknown key; did you mean "clip_eps"?',
        'engine.temperature: should be a valid number (given "hot")',
        'modle: unknown key; did you mean "model"?',
        'rewards.0.loudnes: unknown key; did you mean "loudness"?',
        "logging.samples: should be 'all' or 'none' or should be a valid integer (given \"some\")",
        'prompts.max_prompt_token: unknown key; did you mean "max_prompt_tokens"?',
        "model.lora.rank: unknown key",
    ):
        assert line in text, line
    assert "(known: r, alpha, rslora, dora, init, dropout, target_modules)" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.seed=1.5"], "train.seed: should be a valid integer"),
        (["train.seed='1'"], "train.seed: should be a valid integer"),
        (["optimizer.lr=.nan"], "optimizer.lr: should be a finite number"),
        (["optimizer.betas=[0.9]"], "optimizer.betas.1: is required"),
        (["optimizer.betas=[0.9, 1.0]"], "optimizer.betas.1: should be less than 1 (given 1.0)"),
        (["reward_scaling.clip=[1, 0]"], "clip needs low < high, got [1.0, 0.0]"),
        (["train.prompts_per_episode=8", "train.train_batch_size=9"], "an episode has only 8 samples"),
        (["model.device=gpu"], "model.device: String should match pattern"),
        (["model.device=mps"], "model.device: mps (Apple GPUs) is not supported, only cpu and cuda are"),
        (["model=null"], "model: is required"),
        (["model.path=null"], "model.path: should be a valid string"),
        (["prompts=null"], "prompts.name: is required: the name of a plugin"),
        (["prompts.name=3"], "prompts.name: is not a name: 3"),
        (["algorithm=[1]"], "algorithm: should be a plugin's name, or a mapping"),
        (["algorithm.name=fake-lern"], 'no algorithm "fake-lern" is installed; did you mean "fake-learn"?'),
        (["rewards=[]"], "rewards: is empty, but fake-learn learns from rewards"),
        (["rewards=exact-match"], "rewards: should be a list of rewards"),
        (["rewards=[fake-shout, fake-shout]"], 'rewards.1: a second reward "fake-shout": give it its own `label`'),
        (["rewards.0.retries=-1"], "rewards.0.retries: should be greater than or equal to 0"),
        (["eval.score=fake-shut"], 'eval.score: no reward "fake-shut" in this run; did you mean "fake-shout"?'),
        (["eval.prompts={name: fake-lines, too_lon: skip}"], "eval.prompts.too_lon: unknown key"),
        (["engine.max_new_tokens=0"], "engine.max_new_tokens: should be greater than or equal to 1 (given 0)"),
    ],
)
def test_each_problem_says_where_and_what(fake_run, overrides, message):
    assert message in problems_of(fake_run, *overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", '--set optimizer.lr: should be a valid number (given "fast")'),
        ("rewards=[fake-shut]", '--set rewards: rewards.0.name: no reward "fake-shut" is installed'),
        ("train.train_batch_size=100000", "run.yaml with --set train.train_batch_size: train: "),
        ("nonsense=null", "--set nonsense: unknown key"),
        ("rewards.0.label=mean", '--set rewards.0.label: "mean" is a metric'),
    ],
)
def test_a_problem_that_set_made_is_blamed_on_it(fake_run, override, message):
    assert problems_of(fake_run, override).startswith(message)


def test_of_several_problems_each_names_the_set_that_made_it(fake_run):
    text = problems_of({**fake_run, "model": {"path": 3}}, "optimizer.lr=fast")
    assert text.startswith("run.yaml: 2 problems")
    assert "model.path: should be a valid string (given 3)\n" in text
    assert 'optimizer.lr: should be a valid number (given "fast") (--set optimizer.lr)' in text


@pytest.mark.parametrize("typed", ["1", "1e3", "true", "007", "1_000"])
def test_an_option_that_is_text_takes_any_scalar_of_set_as_typed(fake_run, typed):
    overrides = [f"model.path={typed}", f"rewards.0.word={typed}", f"rewards.0.label={typed}"]
    resolved = resolve(load_run(load_run(fake_run, overrides)))
    assert resolved.run.model.path == typed
    assert resolved.rewards[0].config.word == typed
    assert resolved.rewards[0].config.label == typed


def test_an_unknown_section_without_content_is_an_error(fake_run):
    assert "nonsense: unknown key" in problems_of({**fake_run, "nonsense": None})


def test_the_name_of_a_plugin_of_another_kind_is_recognized(fake_run):
    text = problems_of({**fake_run, "rewards": ["fake-learn"]})
    assert 'no reward "fake-learn" is installed, but "fake-learn" is one of the algorithms (' in text
    assert "did you mean" not in text


@pytest.mark.parametrize("section", ["prompts", "eval.prompts"])
def test_a_file_named_as_a_prompt_source_is_shown_as_a_path(fake_run, section):
    text = problems_of({**fake_run, "eval": {"num_prompts": 4}}, f"{section}=data/mine.jsonl")
    assert "-> a file of prompts is {name: jsonl, path: data/mine.jsonl}" in text


def test_an_offline_algorithm_needs_no_rewards(fake_run):
    fake_run.pop("rewards")
    resolved = resolve({**fake_run, "algorithm": "fake-offline"})
    assert resolved.rewards == ()
    assert resolved.algorithm.component.feeds == "dataset"


def test_two_rewards_of_one_name_live_under_labels(fake_run):
    rewards = ["fake-shout", {"name": "fake-shout", "label": "second"}, "fake-whisper"]
    resolved = resolve({**fake_run, "rewards": rewards})
    assert [reward.config.label for reward in resolved.rewards] == ["fake-shout", "second", "fake-whisper"]
    assert resolve(resolved.to_mapping()).to_mapping() == resolved.to_mapping()


def test_a_file_reward_is_named_by_its_function(fake_run, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def tidy(rollouts, *, depth: int = 2):\n    return [0.0] * len(rollouts)\n")
    monkeypatch.chdir(tmp_path)
    resolved = resolve({**fake_run, "rewards": ["./mine.py:tidy:2"]})
    (reward,) = resolved.rewards
    assert (reward.config.label, reward.config.weight, reward.config.depth) == ("tidy", 2.0, 2)
    monkeypatch.chdir("/")
    assert resolve(resolved.to_mapping()).rewards[0].config.label == "tidy", "the resolved path is absolute"


@pytest.mark.parametrize(
    ("group", "source", "message"),
    [
        ("rewards", "def thing(rollouts, *, timeout_seconds: int = 1): ...", "its options timeout_seconds have names"),
        (
            "engines",
            "class C(BaseModel):\n    stop: int = 1\nthing = Component('A.', C, 'a:b')",
            "its options stop have",
        ),
    ],
)
def test_options_that_collide_with_cores_are_refused(install, fake_run, group, source, message):
    head = "from pydantic import BaseModel\nfrom rlhf_core.components import Component\n"
    install("acme", {f"rlhf.{group}": {"acme-thing": "acme_collide:thing"}}, {"acme_collide": head + source})
    override = "rewards=[acme-thing]" if group == "rewards" else "engine=acme-thing"
    assert message in problems_of(fake_run, override)


def test_an_engine_that_does_not_subclass_cores_options_has_them_all_the_same(install, fake_run):
    head = "from pydantic import BaseModel\nfrom rlhf_core.components import Component\n"
    source = head + "class C(BaseModel):\n    speed: int = 1\nthing = Component('A.', C, 'a:b')"
    install("acme", {"rlhf.engines": {"acme-engine": "acme_plain:thing"}}, {"acme_plain": source})
    resolved = resolve({**fake_run, "engine": {"name": "acme-engine", "speed": 3, "top_k": 4, "max_new_tokens": 6}})
    assert resolved.engine.config.speed == 3 and type(resolved.engine.config).__name__ == "C"
    assert (resolved.sampling.top_k, resolved.sampling.max_new_tokens) == (4, 6)
    assert resolve(resolved.to_mapping()).to_mapping() == resolved.to_mapping()


def test_processes_go_with_transport_and_strategy(fake_run):
    check_processes(resolve(fake_run), 1)
    with pytest.raises(ConfigError, match=r"transport\.num_trainers=2"):
        check_processes(resolve({**fake_run, "transport": "fake-far"}), 2)
    with pytest.raises(ConfigError, match="at least 1"):
        check_processes(resolve(fake_run), 0)


@pytest.mark.parametrize("key", ["prompts_per_episode", "train_batch_size"])
def test_more_processes_than_work_is_explained(fake_run, key):
    run = {**fake_run, "transport": "local", "train": {"prompts_per_episode": 8, "train_batch_size": 8, key: 3}}
    resolved = resolve({**run, "train": {**run["train"], "samples_per_prompt": 4}})
    check_processes(resolved, 3)
    with pytest.raises(ConfigError, match=rf"more processes than train\.{key} \(3\)"):
        check_processes(resolved, 4)


def test_the_schema_holds_every_installed_plugin(install):
    install("acme", {"rlhf.algorithms": {"acme-broken": "acme_absent:thing"}})
    document, left_out = run_schema()
    definitions = {f"#/$defs/{name}": each for name, each in document["$defs"].items()}
    chosen = [definitions.get(each.get("$ref"), each) for each in document["properties"]["algorithm"]["anyOf"]]
    assert {"fake-learn", "fake-offline"} <= {each.get("title") for each in chosen}
    assert any("acme_absent" in error.message for error in left_out)
    rewards = document["properties"]["rewards"]["items"]["anyOf"]
    reward = definitions[next(each["$ref"] for each in rewards if each.get("$ref", "").endswith("/fake-shout"))]
    assert {"name", "weight", "timeout_seconds", "loudness"} <= set(reward["properties"])
    assert document["required"] == ["model"]  # an environment may stand in for prompts
    text = str(document)
    references = {part.split("'")[0] for part in text.split("#/$defs/")[1:]}
    assert references <= set(document["$defs"])


def test_the_known_keys_are_named_once(fake_plugins, fake_run):
    with pytest.raises(ConfigError) as caught:
        resolve({**fake_run, "trian": {}})
    known = str(caught.value).partition("(known: ")[2].partition(")")[0].split(", ")
    assert len(known) == len(set(known))
    assert {"prompts", "engine", "algorithm", "rewards", "train"} <= set(known)
