"""Min-p, penalties and banned words: the distribution is that of transformers, and log-probs are the trainer's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer_agreement import assert_trainer_agrees
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from rlhf_core import train
from rlhf_core.columns import Columns
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import SamplingParams
from rlhf_forward import BANNED, SHAPING_COLUMNS, BannedWords
from rlhf_testing.contracts.engine import as_experience
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.runs import tiny_run

RUN = SamplingParams(max_new_tokens=12, temperature=0.9)
OPTIONS = {"min_p": 0.02, "repetition_penalty": 1.4, "presence_penalty": 0.7}


def with_options(asked, **options):
    return [replace(each, options={**each.options, **options}) for each in asked]


def exact_log_probs(module, prompt_ids, answer, *, temperature=0.9, banned=()):
    """Log-probs of each token by transformers' own processors, in float64."""
    found, double = [], module.double().eval()
    for place, token in enumerate(answer.token_ids):
        ids = torch.tensor([[*prompt_ids, *answer.token_ids[:place]]])
        with torch.no_grad():
            logits = double(ids, use_cache=False).logits[:, -1]
        if (repetition := OPTIONS["repetition_penalty"]) != 1.0:
            logits = RepetitionPenaltyLogitsProcessor(repetition)(ids, logits)
        for earlier in set(answer.token_ids[:place]):
            logits[0, earlier] -= OPTIONS["presence_penalty"]
        if banned:
            own = ids[:, len(prompt_ids) :]  # a word does not begin in the prompt
            logits = NoBadWordsLogitsProcessor([list(each) for each in banned])(own, logits)
        logits = MinPLogitsWarper(OPTIONS["min_p"])(ids, logits / temperature)
        found.append(float(logits.log_softmax(-1)[0, token]))
    return found


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_log_probs_are_those_of_transformers_processors(family, model, engine, requests, collect):
    module, asked = model(family), with_options(requests(5), **OPTIONS)
    answers = collect(engine(module, max_batch_size=3), asked, RUN)
    for request in asked:
        answer = answers[request.sample_id]
        assert answer.logprobs == pytest.approx(exact_log_probs(module, request.prompt_ids, answer), abs=2e-5)
        module.float()


def test_an_answer_does_not_depend_on_the_options_of_others(model, engine, requests, collect):
    module, asked = model("llama"), requests(9)
    mixed = [
        replace(each, options=[{}, OPTIONS, {"min_p": 0.05}, {"temperature": 0.5, **OPTIONS}][place % 4])
        for place, each in enumerate(asked)
    ]
    together = collect(engine(module, max_batch_size=9), mixed, RUN)
    for request in mixed:
        alone = collect(engine(module), [request], RUN)[request.sample_id]
        answer = together[request.sample_id]
        assert (answer.token_ids, answer.support_ids) == (alone.token_ids, alone.support_ids)
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize("top_k", [0, 9])
def test_the_trainer_rebuilds_the_distribution(top_k, model, engine, requests, collect):
    """Also in a batch with samples without options, and with the gradient of the shaped log-prob."""
    module, asked = model("llama"), requests(8)
    asked = [*with_options(asked[:5], **OPTIONS), *asked[5:]]
    answers = collect(engine(module), asked, replace(RUN, top_k=top_k))
    done = {key: replace(each, columns=Columns(each.columns, SHAPING_COLUMNS)) for key, each in answers.items()}
    batch = as_experience([(each.prompt_ids, done[each.sample_id]) for each in asked])
    assert_trainer_agrees(module, batch, RUN.temperature)


def test_banned_words_are_never_sampled(model, engine, requests, collect):
    module, asked = model("llama"), with_options(requests(6), **OPTIONS)
    free = collect(engine(module), asked, RUN)
    frequent = max(
        (t for each in free.values() for t in each.token_ids),
        key=lambda t: sum(t in a.token_ids for a in free.values()),
    )
    made = engine(module)
    made._banned = BannedWords([], None)
    made._banned.sequences = [(frequent,), free[asked[0].sample_id].token_ids[:2]]
    answers = collect(made, asked, RUN)
    for request in asked:
        answer = answers[request.sample_id]
        assert frequent not in answer.token_ids
        assert answer.token_ids[:2] != made._banned.sequences[1]
        banned = answer.columns[BANNED]
        assert [len(ids) for ids in banned] == [2] * len(answer.token_ids) and banned[0][0] == frequent
        expected = exact_log_probs(module, request.prompt_ids, answer, banned=made._banned.sequences)
        assert answer.logprobs == pytest.approx(expected, abs=2e-5)
        module.float()


def test_greedy_answers_ignore_all(model, engine, requests, collect):
    module, asked, greedy = model("llama"), requests(4), SamplingParams(max_new_tokens=8, greedy=True)
    assert collect(engine(module), with_options(asked, **OPTIONS), greedy) == collect(engine(module), asked, greedy)


@pytest.mark.parametrize(
    "options", [{"min_p": 1.0}, {"min_p": True}, {"repetition_penalty": 0}, {"presence_penalty": "1"}]
)
def test_an_option_out_of_range_is_refused(options, model, engine, requests):
    (request,) = with_options(requests(1), **options)
    with pytest.raises(DataError, match=f"sample 1000: the option {next(iter(options))} is"):
        engine(model("llama")).generate([request], RUN)


def test_a_turn_with_a_presence_penalty_is_refused(model, engine, requests):
    (request,) = with_options(requests(1), presence_penalty=0.5)
    for change in ({"goes_on": True}, {"offset": 3}, {"branch": 1}):
        with pytest.raises(DataError, match="a turn of an episode has a presence_penalty"):
            engine(model("llama")).generate([replace(request, **change)], RUN)


def test_words_become_the_sequences_of_both_spellings():
    words = BannedWords(["12"], tiny_tokenizer())
    assert words.after(words.sequences[0], len(words.sequences[0]) - 1)[0] == words.sequences[0][-1]
    with pytest.raises(ConfigError, match="engine.banned_words: .* the end of an answer"):
        BannedWords([tiny_tokenizer().eos_token], tiny_tokenizer())


@pytest.mark.parametrize(
    "engine_options",
    [
        {"min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"banned_words": ["1"], "top_k": 5},
        {"min_p": 0.02, "repetition_penalty": 0.8, "banned_words": ["2", "34"], "temperature": 0.7},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize(
    "algorithm", [{"name": "ppo"}, {"name": "grpo", "importance_cap": 2.0}], ids=lambda each: each["name"]
)
@pytest.mark.slow_except(
    "ppo-min_p-repetition_penalty-banned_words-temperature", "grpo-repetition_penalty-presence_penalty"
)
def test_a_run_trains_on_the_sampled_distribution(algorithm, engine_options, tmp_path):
    run = tiny_run(
        {
            "algorithm": algorithm,
            "engine": {"max_new_tokens": 8, **engine_options},
            "optimizer": {"lr": 3e-3},
            "train": {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4},
        }
    )
    result = train(run, output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in result.metrics)
    assert all(abs(line["policy/ratio_mean"] - 1) < 0.2 for line in result.metrics)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"options": {"min_p": 0.1}}}, r"engine\.options\.min_p: is an option of the section"),
        ({"engine": {"min_p": 1.0}}, r"engine\.min_p: should be less than 1"),
        (
            {"engine": {"presence_penalty": 0.5}, "environment": "guess-number"},
            r"engine\.presence_penalty: looks at one answer",
        ),
        ({"engine": {"name": "http", "url": "http://localhost:1", "min_p": 0.1}}, r"engine\.min_p: unknown key"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        train(tiny_run(changes), dry_run=True)
