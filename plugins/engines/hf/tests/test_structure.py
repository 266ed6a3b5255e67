"""Structured answers: tokens and log-probs are those of an enumeration of the language, and the trainer's are equal."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import product

import pytest
import torch
from trainer_agreement import assert_trainer_agrees

from rlhf_core import train
from rlhf_core.columns import Columns
from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.models.kinds import MARK
from rlhf_core.types import SamplingParams
from rlhf_forward import SHAPING_COLUMNS, STRUCTURE, STRUCTURE_COLUMNS, policy_forward
from rlhf_models import CausalLM
from rlhf_testing.contracts.engine import as_experience
from rlhf_testing.runs import tiny_run
from rlhf_testing.tiny import contract_tokenizer

pytest.importorskip("llguidance")

EOS = 2
TOKENIZER = contract_tokenizer()
"""That of the fixture `engine`, with two more characters."""
RUN = SamplingParams(max_new_tokens=12, temperature=0.9)
REGEX = {"regex": "(12|1[3-5]|9{2,3},)(:[0-3])?"}
LARK = {"lark": 'start: pair ("," pair)?\npair: DIGIT ":" DIGIT\nDIGIT: /[0-2]/\n'}
SCHEMA = {"json_schema": {"enum": [12, 7, 345]}}
PAIRS = [f"{one}:{two}" for one, two in product("012", repeat=2)]
LANGUAGES = {
    "regex": (REGEX, [a + b for a in ("12", "13", "14", "15", "99,", "999,") for b in ("", ":0", ":1", ":2", ":3")]),
    "lark": (LARK, [*PAIRS, *(f"{one},{two}" for one, two in product(PAIRS, repeat=2))]),
    "schema": (SCHEMA, ["12", "7", "345"]),
}


def with_options(asked, **options):
    return [replace(each, options={**each.options, **options}) for each in asked]


def allowed_after(language, text):
    """Ids that may follow a text, by enumeration of all texts of the language."""
    found = {TOKENIZER.encode(each[len(text)])[0] for each in language if each.startswith(text) and each != text}
    return found | ({EOS} if text in language else set())


def exact_log_probs(module, prompt_ids, answer, language, *, temperature=0.9):
    """Log-probs of each token in float64, renormalized over the allowed tokens."""
    found, double = [], module.double().eval()
    for place, token in enumerate(answer.token_ids):
        ids = torch.tensor([[*prompt_ids, *answer.token_ids[:place]]])
        with torch.no_grad():
            logits = double(ids, use_cache=False).logits[0, -1] / temperature
        allowed = sorted(allowed_after(language, TOKENIZER.decode(answer.token_ids[:place])))
        assert token in allowed
        found.append(float(logits[token] - logits[allowed].logsumexp(0)))
    module.float()
    return found


class Kind(CausalLM):
    """The kind of a model whose tokenizer exists in memory only."""

    def load_tokenizer(self):
        return TOKENIZER


def of_its_kind(module):
    vars(module)[MARK] = Kind()
    return module


def batch_of(asked, answers, **columns):
    kinds = {**SHAPING_COLUMNS, **STRUCTURE_COLUMNS}
    done = {key: replace(each, columns=Columns({**each.columns, **columns}, kinds)) for key, each in answers.items()}
    return as_experience([(each.prompt_ids, done[each.sample_id]) for each in asked])


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_log_probs_are_those_of_the_allowed_tokens(name, family, model, engine, requests, collect):
    structure, language = LANGUAGES[name]
    module, asked = model(family), with_options(requests(6), structure=structure)
    answers = collect(engine(module, max_batch_size=3), asked, RUN)
    for request in asked:
        answer = answers[request.sample_id]
        assert TOKENIZER.decode(answer.token_ids[:-1]) in language and answer.token_ids[-1] == EOS
        expected = exact_log_probs(module, request.prompt_ids, answer, language)
        assert answer.logprobs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("options", [{}, {"min_p": 0.05, "repetition_penalty": 1.4}], ids=["plain", "shaped"])
@pytest.mark.parametrize("top_k", [0, 5])
def test_the_trainer_rebuilds_the_mask(top_k, options, model, engine, requests, collect):
    """In a batch with other structures and free answers, after a correction too, and with finite gradients."""
    module, asked = of_its_kind(model("llama")), requests(9)
    structures = [{"structure": REGEX}, {"structure": LARK}, {"structure": SCHEMA}, {}]
    asked = [replace(each, options={**options, **structures[place % 4]}) for place, each in enumerate(asked)]
    answers = collect(engine(module), asked, replace(RUN, top_k=top_k))
    batch = batch_of(asked, answers)
    assert_trainer_agrees(module, batch, RUN.temperature)


def test_a_token_that_the_grammar_does_not_allow_is_named(model, engine, requests, collect):
    module, asked = of_its_kind(model("llama")), with_options(requests(1), structure=REGEX)
    batch = batch_of(asked, collect(engine(module), asked, RUN))
    batch.sequences[0, batch.prompt_length] = TOKENIZER.encode("7")[0]
    with pytest.raises(RlhfError, match=r"token \d+ of sample .* is not allowed by the grammar"):
        policy_forward(module, batch, RUN.temperature)


def test_an_answer_does_not_depend_on_the_structures_of_others(model, engine, requests, collect):
    module, asked = model("llama"), requests(8)
    mixed = [
        replace(each, options=[{}, {"structure": REGEX}, {"structure": LARK}][i % 3]) for i, each in enumerate(asked)
    ]
    together = collect(engine(module, max_batch_size=8), mixed, RUN)
    for request in mixed:
        alone = collect(engine(module), [request], RUN)[request.sample_id]
        assert together[request.sample_id].token_ids == alone.token_ids


def test_greedy_answers_have_the_structure(model, engine, requests, collect):
    structure, language = LANGUAGES["regex"]
    asked = with_options(requests(3), structure=structure)
    answers = collect(engine(model("llama")), asked, SamplingParams(max_new_tokens=12, greedy=True))
    assert all(TOKENIZER.decode(each.token_ids[:-1]) in language for each in answers.values())


def test_a_request_may_be_free_in_a_structured_run(model, engine, requests, collect):
    module, asked = model("llama"), requests(2)
    sampling = replace(RUN, options={"structure": REGEX})
    free = collect(engine(module), with_options(asked, structure=None), sampling)
    assert free == collect(engine(module), asked, RUN)
    assert all(STRUCTURE not in each.columns for each in free.values())


def test_an_answer_ends_where_no_token_may_follow(model, engine, requests, collect):
    """As where a grammar exceeds a limit, instead of ending the run, or the answers of others."""
    hostile = {"regex": "1{5}é"}
    module, (one, other) = model("llama"), requests(2)
    asked = [replace(one, options={"structure": hostile}), other]
    answers = collect(engine(module), asked, RUN)
    answer = answers[one.sample_id]
    assert (TOKENIZER.decode(answer.token_ids), answer.finish_reason) == ("11111", "length")
    alone = collect(engine(module), [other], RUN)[other.sample_id]
    assert answers[other.sample_id].token_ids == alone.token_ids
    assert answers[other.sample_id].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("yes|no", "the option structure is 'yes|no'"),
        ({"regex": "a", "lark": "b"}, "the option structure is"),
        ({"xml": "a"}, "the option structure is"),
        ({"regex": 3}, "the regex of the option structure is 3"),
        ({"json_schema": "x"}, "the json_schema of the option structure is 'x'"),
        ({"regex": "(1"}, "the regex of the option structure is invalid"),
        ({"json_schema": {"type": "strange"}}, "the json_schema of the option structure is invalid"),
        ({"json_schema": {"$ref": "http://localhost:1/x.json"}}, "the json_schema of the option structure is invalid"),
        ({"lark": "start: missing"}, "the lark of the option structure is invalid"),
        ({"regex": "é"}, "the regex of the option structure is invalid"),
        ({"regex": "1" * 40_000}, "more than 32768 bytes"),
    ],
)
def test_an_invalid_structure_is_named(structure, message, model, engine, requests):
    (request,) = with_options(requests(1), structure=structure)
    with pytest.raises(DataError, match=message):
        engine(model("llama")).generate([request], RUN)


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "ppo"}, {"name": "grpo", "importance_cap": 2.0, "kl_coef": 0.05}],
    ids=lambda each: each["name"],
)
@pytest.mark.parametrize("structure", ["inline", "file"])
@pytest.mark.slow_except("inline-grpo", "file-ppo")
def test_a_run_trains_on_the_masked_distribution(structure, algorithm, tmp_path):
    (tmp_path / "answer.lark").write_text('start: DIGITS "," DIGITS\nDIGITS: /[0-9]{1,3}/\n', encoding="utf-8")
    value = {"regex": "[0-9]{1,3},[0-9]{1,3}"} if structure == "inline" else {"file": str(tmp_path / "answer.lark")}
    run = tiny_run(
        {
            "algorithm": algorithm,
            "engine": {"max_new_tokens": 8, "structure": value},
            "optimizer": {"lr": 3e-3},
            "train": {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4},
        }
    )
    result = train(run, output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in result.metrics)
    assert all(abs(line["policy/ratio_mean"] - 1) < 0.2 for line in result.metrics)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert samples and all("," in each["completion"] for each in samples)


def test_each_prompt_may_have_its_own_structure(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    path = tmp_path / "prompts.jsonl"
    records = [
        {"prompt": "1,2>", "answer": "1", "form": {"regex": "[12]{3}"}},
        {"prompt": "3,4>", "answer": "2", "form": {"json_schema": {"enum": [345]}}},
        {"prompt": "5>", "answer": "3"},
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    run = tiny_run(
        {
            "prompts": {"name": "jsonl", "path": str(path), "sampling": {"structure": "form"}},
            "engine": {"max_new_tokens": 8},
            "train": {"episodes": 2, "prompts_per_episode": 3, "samples_per_prompt": 2, "train_batch_size": 6},
        }
    )
    result = train(run, output=tmp_path / "run")
    assert result is not None and all(line["rollout/logprob_gap_max"] < 1e-4 for line in result.metrics)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {each["completion"] for each in samples if each["prompt"] == "3,4>"} == {"345"}
    assert all(set(each["completion"]) <= {"1", "2"} for each in samples if each["prompt"] == "1,2>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine": {"structure": {"regex": "(1"}}},
            r"engine\.structure: the regex of the option structure is invalid",
        ),
        ({"engine": {"structure": "yes|no"}}, r"engine\.structure: the option structure is 'yes\|no'"),
        ({"engine": {"structure": {"file": "form.xml"}}}, r"engine\.structure: the name of the file form\.xml should"),
        (
            {"engine": {"structure": {"file": "absent.json"}}},
            r"engine\.structure: the file absent\.json cannot",
        ),
        ({"engine": {"options": {"structure": REGEX}}}, r"engine\.options\.structure: is an option of the section"),
        (
            {"engine": {"name": "http", "url": "http://localhost:1", "structure": REGEX}},
            r"engine\.structure: unknown key",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        train(tiny_run(changes), dry_run=True)
