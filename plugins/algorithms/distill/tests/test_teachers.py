"""Teachers of every kind against a forward of each sample alone in float64, and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from scoring_server import ScoringServer, scoring_server, slow_log_probs
from teaching import TOKENIZER, group_of, with_metadata

from rlhf_core.columns import TEMPERATURE, Column, Columns
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import ConfigError, DataError, DeadlineError, RlhfError, UserInputError
from rlhf_core.models import GroupPasses
from rlhf_core.place import LocalPlace
from rlhf_core.types import SamplingParams, Turn
from rlhf_distill.algorithm import Distill, build
from rlhf_distill.config import DistillConfig
from rlhf_testing.models import tiny_model

POLICY, TEACHER = tiny_model(seed=1).eval(), tiny_model(seed=7).eval()
GROUPS = [
    group_of(0, "31>", ["13", "31", "123"], [1.0, 0.0, 2.0], answer="13", kind="a"),
    group_of(1, "52,1>", ["125", "12312", ""], [0.0, 0.0, 0.0], answer="125", kind="b"),
]


@pytest.fixture
def server() -> Iterator[ScoringServer]:
    with scoring_server(TEACHER) as served:
        yield served


def distill(given: dict[str, Any], /, *, samples_per_prompt: int = 3, **sampling: Any) -> Distill:
    context = AlgorithmContext(
        sampling=SamplingParams(max_new_tokens=8, **sampling),
        samples_per_prompt=samples_per_prompt,
        tokenizer=TOKENIZER,
    )
    return build(DistillConfig.model_validate(given), context)


def taught(options: dict[str, Any], groups: Any = GROUPS, **models: Any) -> list[Any]:
    """The items of the groups, with the teachers' columns."""
    place = LocalPlace(torch.device("cpu"), torch.float32)
    made = GroupPasses(place, {"policy": POLICY, "reference": TEACHER, **models}, distill(options).passes)
    return [item for group in made.run(groups) for item in group.items]


def check(item: Any, model: Any, prompt: str, top_k: int) -> None:
    """The columns of a sample are those of a model after a prompt."""
    ids, found = item.response_ids.tolist(), item.columns["teacher_log_probs"]
    for t, row in enumerate(slow_log_probs(model, TOKENIZER.encode(prompt), ids)):
        if not top_k:
            assert found[t].tolist() == pytest.approx([row[ids[t]]], abs=1e-5)
            continue
        kept = item.columns["teacher_ids"][t].tolist()
        assert sorted(kept) == sorted(sorted(range(len(row)), key=lambda i: -row[i])[:top_k])
        rest = math.log(1.0 - math.fsum(math.exp(row[each]) for each in kept))
        assert found[t].tolist() == pytest.approx([*(row[each] for each in kept), rest], abs=1e-4)


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize(("policy", "model"), [("current", POLICY), ("start", TEACHER)])
def test_the_policy_with_the_answer_in_its_prompt(policy: str, model: Any, top_k: int) -> None:
    options = {"teacher": {"policy": policy, "context": "{answer},{prompt}"}, "top_k": top_k}
    items = taught(options)
    for item, prompt in zip(items, ["13,31>"] * 3 + ["125,52,1>"] * 3, strict=True):
        check(item, model, prompt, top_k)
        assert "teacher_spans" not in item.columns
    assert distill(options).roles == {"policy", "policy" if policy == "current" else "reference"}


def test_the_last_message_of_a_chat_has_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for each in messages %}{{ each['content'] }}{{ '>' if loop.last else ',' }}{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", template, raising=False)
    group = group_of(0, "1,31>", ["13", "31"], [1.0, 0.0], answer="13")
    messages = ({"role": "user", "content": "1"}, {"role": "user", "content": "31"})
    group = replace(group, rollouts=tuple(replace(each, messages=messages) for each in group.rollouts))
    teacher = {"policy": "current", "context": "{answer},{prompt}"}
    for item in taught({"teacher": teacher}, [group]):
        check(item, POLICY, "1,13,31>", 0)
    ended = ({"role": "user", "content": "1"}, {"role": "assistant", "content": "31"})
    group = replace(group, rollouts=tuple(replace(each, messages=ended) for each in group.rollouts))
    with pytest.raises(DataError, match="the last message of its chat is not the text of a user but of 'assistant'"):
        taught({"teacher": teacher}, [group])


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_demonstration_is_the_best_other_answer(top_k: int) -> None:
    options = {"teacher": {"policy": "current", "context": "{prompt}{demonstration}>"}, "top_k": top_k}
    items = taught(options)
    for item, prompt in zip(items[:3], ["31>123>", "31>123>", "31>13>"], strict=True):
        check(item, POLICY, prompt, top_k)
        assert item.columns["teacher_spans"].tolist() == list(range(item.num_response_tokens))
    for item in items[3:]:  # none of its answers is good
        assert set(item.columns["teacher_spans"].tolist()) == {-1}
        assert not item.columns["teacher_log_probs"].any()


def test_untaught_samples_do_not_count() -> None:
    made = distill({"teacher": {"policy": "current", "context": "{prompt}{demonstration}>"}, "top_k": 3})
    items = taught({"teacher": {"policy": "current", "context": "{prompt}{demonstration}>"}, "top_k": 3})
    whole, part = (made.collate([replace(i, score=0.0) for i in some]) for some in (items, items[:3]))
    assert made.counts(whole) == made.counts(part) == {"distill": sum(i.num_response_tokens for i in items[:3])}
    one, other = (made.loss({"policy": POLICY}, made.advantages(batch)).sums["distill"] for batch in (whole, part))
    assert one.item() == pytest.approx(other.item(), rel=1e-5) and one.item() > 0


def test_feedback_is_the_text_of_the_environment() -> None:
    turns = (Turn(role="policy", text="1", token_ids=()), Turn(role="environment", text="5", token_ids=()))
    group = GROUPS[0]
    group = replace(group, rollouts=(replace(group.rollouts[0], turns=turns), *group.rollouts[1:]))
    items = taught({"teacher": {"policy": "current", "context": "{feedback},{prompt}"}}, [group])
    check(items[0], POLICY, "5,31>", 0)
    assert [int(item.columns["teacher_spans"][0]) for item in items] == [0, -1, -1]


def test_each_sample_has_the_teacher_of_its_key() -> None:
    options = {
        "teachers": {"a": {"path": "x"}, "b": {"policy": "current", "context": "{answer}{prompt}"}, "c": {"path": "y"}},
        "teacher_key": "kind",
        "top_k": 2,
    }
    items = taught(options, **{"teachers.a": TEACHER, "teachers.c": POLICY})
    for item, model, prompt in zip(items, [TEACHER] * 3 + [POLICY] * 3, ["31>"] * 3 + ["12552,1>"] * 3, strict=True):
        check(item, model, prompt, 2)
    assert distill(options).roles == {"policy", "teachers.a", "teachers.c"}
    assert distill(options).frozen_models.keys() == {"teachers.a", "teachers.c"}
    with pytest.raises(
        DataError, match=r"teacher_key, prompt 1: the key kind of its record is 'z', the teachers are a"
    ):
        taught(
            options, [GROUPS[0], with_metadata(GROUPS[1], kind="z")], **{"teachers.a": TEACHER, "teachers.c": POLICY}
        )


@pytest.mark.parametrize(("protocol", "top_k"), [("vllm", 0), ("vllm", 4), ("openai", 0)])
def test_a_server_returns_what_a_local_model_does(
    server: ScoringServer, protocol: str, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    server.refusals = [(503, {"error": "busy"})]
    options = {"url": server.url, "model": "large", "protocol": protocol, "key_env": "TEACHER_KEY"}
    items = taught({"teacher": {"server": options}, "top_k": top_k})
    for item, prompt in zip(items, ["31>"] * 3 + ["52,1>"] * 3, strict=True):
        check(item, TEACHER, prompt, top_k)
    assert len(server.requests) == len(items) + 1
    for headers, body in server.requests:
        assert headers["Authorization"] == "Bearer s3cret" and headers["path"] == "/v1/completions"
        assert body["model"] == "large" and body["temperature"] == 1.0


@pytest.mark.parametrize("with_server", [False, True])
def test_a_teacher_with_other_tokens(pairs: Any, server: ScoringServer, tmp_path: Any, with_server: bool) -> None:
    pairs.save_pretrained(tmp_path)
    other = server.model = tiny_model(pairs, seed=3).eval()
    server.tokenizer = pairs
    source = {"server": {"url": server.url, "model": "other"}} if with_server else {"path": str(tmp_path)}
    options = {"teacher": {**source, "tokenizer": str(tmp_path), "context": "{answer},{prompt}"}}
    items = taught(options, teacher=other)
    pieces = [["1", "3"], ["31"], ["12", "3"], ["12", "5"], ["12", "3", "12"], []]
    sizes = [[1, 1], [2], [2, 1], [2, 1], [2, 1, 2], []]
    for item, prompt, tokens, size in zip(items, ["13,31>"] * 3 + ["125,52,1>"] * 3, pieces, sizes, strict=True):
        ids = pairs.convert_tokens_to_ids([*tokens, "<eos>"])
        rows = slow_log_probs(other, pairs.encode(prompt), ids)
        expected = [row[each] for each, row, number in zip(ids, rows, [*size, 1], strict=True) for _ in range(number)]
        assert item.columns["teacher_log_probs"][:, 0].tolist() == pytest.approx(expected, abs=1e-5)
        spans = item.columns["teacher_spans"].tolist()
        assert spans == [span for span, number in enumerate([*size, 1]) for _ in range(number)]


def test_the_same_tokens_by_their_text_are_the_same(tmp_path: Any) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    plain = taught({"teacher": {"path": "x"}}, teacher=TEACHER)
    aligned = taught({"teacher": {"path": str(tmp_path), "tokenizer": str(tmp_path)}}, teacher=TEACHER)
    for one, other in zip(plain, aligned, strict=True):
        assert torch.allclose(one.columns["teacher_log_probs"], other.columns["teacher_log_probs"], atol=1e-6)
        assert other.columns["teacher_spans"].tolist() == list(range(one.num_response_tokens))


@pytest.mark.parametrize(
    ("change", "refusal", "kind", "message"),
    [
        (lambda body: {"choices": []}, None, RlhfError, "not a completion: choices is empty"),
        (lambda body: {"choices": [{}]}, None, RlhfError, "lacks prompt_logprobs.*check protocol"),
        (lambda body: {"choices": [{"prompt_logprobs": [None]}]}, None, RlhfError, "it scores 1 tokens, .* were sent"),
        (lambda body: {"choices": [{"prompt_logprobs": "no"}]}, None, RlhfError, "valid array"),
        (None, (401, {"error": "who"}), ConfigError, "status 401: who.*key_env"),
        (None, (404, {"error": "no model"}), ConfigError, "rejected a request: .*no model.*check model"),
        (None, (503, {"error": "down"}), RlhfError, "unreachable: .*down.*patience_seconds"),
    ],
)
def test_a_server_that_fails(server: ScoringServer, change: Any, refusal: Any, kind: Any, message: str) -> None:
    server.change = change or server.change
    server.refusals = [] if refusal is None else [refusal] * 9
    with pytest.raises(kind, match=f"(?s)algorithm.teacher.server: .*{message}"):
        taught({"teacher": {"server": {"url": server.url, "model": "large", "patience_seconds": 0}}})


@pytest.mark.parametrize("protocol", ["vllm", "openai"])
def test_a_server_with_other_tokens_is_refused(server: ScoringServer, pairs: Any, protocol: str) -> None:
    """Both vocabularies have the policy's ids, so nothing but their texts differs."""
    server.model, server.tokenizer = tiny_model(pairs, seed=3).eval(), pairs
    with pytest.raises(ConfigError, match=r"(?s)its model has other tokens: \d of \d differ .*set tokenizer"):
        taught({"teacher": {"server": {"url": server.url, "model": "other", "protocol": protocol}}})


def test_a_tokenizer_of_another_model_is_refused(pairs: Any, tmp_path: Any) -> None:
    pairs.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"teacher\.tokenizer: is not the tokenizer of the model 'builtin:tiny-digits'"
    ):
        distill({"teacher": {"path": "builtin:tiny-digits", "tokenizer": str(tmp_path)}})


def test_log_probs_must_be_log_probs(server: ScoringServer) -> None:
    def positive(body: Any) -> Any:
        for entries in body["choices"][0]["prompt_logprobs"][1:]:
            for entry in entries.values():
                entry["logprob"] = 0.5
        return body

    server.change = positive
    with pytest.raises(RlhfError, match=r"0\.5 is not a log-prob"):
        taught({"teacher": {"server": {"url": server.url, "model": "large"}}})


def test_a_silent_server_has_a_deadline(server: ScoringServer) -> None:
    server.delay_seconds = 1.0
    options = {"url": server.url, "model": "large", "timeout_seconds": 0.2}
    with pytest.raises(DeadlineError, match=r"did not score 6 samples within 0\.2 s"):
        taught({"teacher": {"server": options}})


def test_rows_and_records_that_do_not_fit() -> None:
    own = {"teacher": {"policy": "current", "context": "{hint}{prompt}"}}
    with pytest.raises(DataError, match=r"prompt 0: its record lacks the key 'hint' .*\(other keys: kind\)"):
        taught(own)
    with pytest.raises(DataError, match="but its model has 512 positions"):
        taught(own, [with_metadata(each, hint="1" * 600) for each in GROUPS])
    group = replace(GROUPS[0], rollouts=tuple(replace(each, prompt="1>") for each in GROUPS[0].rollouts))
    with pytest.raises(DataError, match="starts with more than the text or messages of its prompt"):
        taught(own, [with_metadata(group, hint="1")])


def test_another_temperature_is_refused(server: ScoringServer) -> None:
    hot = Columns({TEMPERATURE: torch.full((3,), 0.5)}, {TEMPERATURE: Column(optional=True)})
    group = replace(
        GROUPS[0],
        items=tuple(replace(each, columns=hot) for each in GROUPS[0].items[:2]),
        rollouts=GROUPS[0].rollouts[:2],
    )
    with pytest.raises(DataError, match="sampled at other temperatures"):
        taught({"teacher": {"server": {"url": server.url, "model": "large"}}}, [group])


CONTEXT = "{answer}{prompt}"
SERVER = {"url": "http://host/v1", "model": "large"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set exactly one of teacher and teachers"),
        ({"teacher": {"path": "x"}, "teachers": {"a": {"path": "x"}}, "teacher_key": "k"}, "exactly one of teacher"),
        ({"teachers": {"a": {"path": "x"}}}, "teachers and teacher_key belong together"),
        ({"teacher": {"path": "x"}, "teacher_key": "k"}, "belong together"),
        ({"teacher": {}}, "exactly one of path, server and policy"),
        ({"teacher": {"path": "x", "policy": "start", "context": CONTEXT}}, "exactly one of path, server and policy"),
        ({"teacher": {"policy": "start"}}, "policy needs context"),
        ({"teacher": {"policy": "start", "context": CONTEXT, "tokenizer": "x"}}, "tokenizer is for path and server"),
        ({"teacher": {"server": SERVER, "offload": True}}, "dtype and offload are for the model of path"),
        ({"teacher": {"policy": "start", "context": "{answer}"}}, "must contain {prompt}"),
        ({"teacher": {"policy": "start", "context": "{prompt} again"}}, "adds nothing of the record"),
        ({"teacher": {"policy": "start", "context": "{prompt}{answer.x}"}}, "is not a plain name"),
        ({"teacher": {"policy": "start", "context": "{prompt}{answer!r}"}}, "is not a plain name"),
        ({"teacher": {"policy": "start", "context": "{prompt}{"}}, "write literal braces twice"),
        ({"teacher": {"path": "x", "tokenizer": "x"}, "top_k": 4}, "its own tokenizer, so its most likely tokens"),
        ({"teacher": {"server": {**SERVER, "protocol": "openai"}}, "top_k": 4}, "protocol openai returns no token ids"),
        ({"teacher": {"server": {**SERVER, "url": "http://u:p@host"}}}, "contains credentials"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DistillConfig.model_validate(options)


@pytest.mark.parametrize(
    ("options", "sampling", "message"),
    [
        ({"server": SERVER}, {"temperature": 0.7}, r"teacher\.server: .*temperature 1, but engine.temperature is 0\.7"),
        (
            {"server": SERVER},
            {"top_p": 0.9},
            r"a server returns log-probs of its whole distribution, but engine\.top_p",
        ),
        (
            {"path": "x", "tokenizer": "builtin:tiny-digits"},
            {"options": {"min_p": 0.1}},
            r"own tokenizer .*engine\.min_p",
        ),
        ({"server": {**SERVER, "key_env": "NO_SUCH_KEY"}}, {}, r"server\.key_env: .*NO_SUCH_KEY is not set"),
        ({"path": "x", "tokenizer": "./no-such-folder"}, {}, r"algorithm\.teacher\.tokenizer: .*no-such-folder"),
    ],
)
def test_runs_that_cannot_be(options: dict[str, Any], sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        distill({"teacher": options}, **sampling)


def test_a_demonstration_needs_other_answers() -> None:
    with pytest.raises(ConfigError, match=r"samples_per_prompt is 1"):
        distill({"teacher": {"policy": "current", "context": "{prompt}{demonstration}"}}, samples_per_prompt=1)


def test_images_are_refused() -> None:
    kind: Any = SimpleNamespace(columns={"pixels": None}, model_kind="vision")
    context = AlgorithmContext(
        sampling=SamplingParams(max_new_tokens=8), samples_per_prompt=2, tokenizer=TOKENIZER, kind=kind
    )
    with pytest.raises(ConfigError, match="prompts of the vision model have other inputs"):
        build(DistillConfig.model_validate({"teacher": {"policy": "start", "context": CONTEXT}}), context)
