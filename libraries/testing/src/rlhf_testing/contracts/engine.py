"""Contract of a rollout engine: its samples, their log-probs, and how it receives new weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from pydantic import BaseModel

from rlhf_core.components import EngineContext
from rlhf_core.place import resolve_device
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.protocols import InFlightEngine, RolloutEngine
from rlhf_core.rollout import replace_weights
from rlhf_core.rollout.answers import with_kinds
from rlhf_core.types import Completion, GenerationRequest, SamplingParams

from ..tiny import EOS_ID, NUM_SPECIAL, as_experience, contract_policy, contract_tokenizer, perturb
from .base import ComponentContract

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

PLAIN = SamplingParams(max_new_tokens=8)
WARM = SamplingParams(max_new_tokens=6, temperature=0.7)
SEED = 11


@dataclasses.dataclass
class Bench:
    """An engine over the tiny policy, and a copy of the weights it should be using."""

    engine: RolloutEngine
    module: nn.Module
    """Module that the engine was built over."""
    twin: nn.Module
    """Separate copy of the weights, to compare the engine's log-probs with."""
    tokenizer: PreTrainedTokenizerBase

    def answers(self, requests: Sequence[GenerationRequest], sampling: SamplingParams = PLAIN) -> dict[int, Completion]:
        """Completions by sample id. Checks that each request has exactly one."""
        completions = list(self.engine.generate(requests, sampling))
        expected, got = sorted(r.sample_id for r in requests), sorted(c.sample_id for c in completions)
        assert expected == got, f"each request needs one completion: requested samples {expected}, got {got}"
        return {each.sample_id: each for each in completions}

    def gap(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> float:
        """Maximum difference of the engine's log-probs from a plain forward pass of the twin, in nats."""
        return self.gap_of(requests, self.answers(requests, sampling), sampling.temperature)

    def gap_of(self, requests: Sequence[GenerationRequest], done: dict[int, Completion], temperature: float) -> float:
        import torch

        from rlhf_forward.forward import policy_forward

        batch = as_experience([(request.prompt_ids, done[request.sample_id]) for request in requests])
        with torch.no_grad():
            expected = policy_forward(self.twin, batch, temperature).log_probs
        return float((expected - batch.action_log_probs).abs().max())


def make_requests(count: int, *, same_prompt: bool = False, first_id: int = 100) -> list[GenerationRequest]:
    """Requests with deterministic prompts of 3 to 9 tokens."""
    numbers = [0 if same_prompt else index for index in range(count)]
    prompts = [tuple(NUM_SPECIAL + (n * 7 + 5 * i + i * i) % 40 for i in range(3 + n % 7)) for n in numbers]
    return [GenerationRequest(sample_id=first_id + i, prompt_ids=ids) for i, ids in enumerate(prompts)]


class EngineContract(ComponentContract):
    """Tests of a rollout engine over a tiny policy in float32.

    Example:
        class TestMyEngine(EngineContract):
            plugin = "my-engine"
    """

    kind = "engines"
    batch_invariant: ClassVar[bool] = True
    """Whether an answer's tokens are the same alone and in a batch, as `RolloutEngine.generate` promises."""
    log_prob_tolerance: ClassVar[float] = 1e-4
    """Maximum difference from a plain forward pass, in nats."""
    option_values: ClassVar[Mapping[str, Any]] = {
        "temperature": 0.6,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "structure": None,
    }
    """Value of each option that the config class declares as `request_options`."""
    hidden_size: ClassVar[int] = 32
    """Hidden size of the tiny policy, which has two heads. Increase it for kernels that need larger heads."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(
        cls, selected: SelectedPlugin, config: BaseModel, rlhf_device: str, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Bench]:

        tokenizer = contract_tokenizer()
        policy = contract_policy(hidden_size=cls.hidden_size)
        folder: Path = tmp_path_factory.mktemp("policy")
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        twin = copy.deepcopy(policy).eval()
        module: nn.Module = policy.to(rlhf_device)  # type: ignore[arg-type]
        context = EngineContext(module, tokenizer, resolve_device(rlhf_device), SEED, model_path=str(folder))
        engine = selected.build(config, context)
        assert isinstance(engine, RolloutEngine), f"{selected.label}: build must return a RolloutEngine, got {engine!r}"
        try:
            yield Bench(engine, module, twin, tokenizer)
        finally:
            engine.close()

    @pytest.mark.parametrize("sampling", [PLAIN, WARM], ids=["plain", "warm"])
    def test_completions_are_well_formed(self, bench: Bench, sampling: SamplingParams) -> None:
        for done in bench.answers(make_requests(9), sampling).values():
            who = f"sample {done.sample_id} ({done.token_ids})"
            assert 1 <= len(done.token_ids) <= sampling.max_new_tokens, f"{who}: empty, or above max_new_tokens"
            assert len(done.logprobs) == len(done.token_ids), f"{who}: needs a log-prob per token, got {done.logprobs}"
            assert all(-1e4 < value <= 1e-6 for value in done.logprobs), f"{who}: invalid log-probs {done.logprobs}"
            assert EOS_ID not in done.token_ids[:-1], f"{who}: tokens follow the first EOS"
            ended = done.token_ids[-1] == EOS_ID
            assert done.finish_reason == ("stop" if ended else "length"), f"{who}: finish_reason {done.finish_reason}"
            assert ended or len(done.token_ids) == sampling.max_new_tokens, f"{who}: ended early without EOS"
            assert done.policy_version == bench.engine.policy_version, f"{who}: policy_version {done.policy_version}"

    def test_turns_of_one_sample(self, bench: Bench) -> None:
        """Requests of one sample differ in branch, draw different noise per branch and offset, and have their own
        limits.
        """
        prompt = make_requests(1)[0].prompt_ids
        turns = [
            GenerationRequest(sample_id=7, prompt_ids=prompt, branch=branch, offset=offset, max_new_tokens=limit)
            for branch, offset, limit in [(0, 0, None), (1, 0, None), (2, 5, None), (3, 0, 2)]
        ]
        by_branch = {each.branch: each for each in bench.engine.generate(turns, SamplingParams(max_new_tokens=16))}
        assert sorted(by_branch) == [0, 1, 2, 3], f"expected one completion per branch 0 to 3, got {sorted(by_branch)}"
        texts = {each.token_ids for each in by_branch.values()}
        assert len(texts) == len(turns), f"branches must draw different noise, got {texts}"
        assert len(by_branch[3].token_ids) <= 2, f"the request's max_new_tokens is 2, got {by_branch[3].token_ids}"

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_are_those_sampled_from(self, bench: Bench, temperature: float) -> None:
        """Log-probs are at the sampling temperature. The trainer compares them with its own."""
        gap = bench.gap(make_requests(9), SamplingParams(max_new_tokens=8, temperature=temperature))
        assert gap <= self.log_prob_tolerance, f"log-probs differ from a forward pass by {gap:.3g} nats"

    def test_request_options_and_columns_are_those_declared(self, bench: Bench, config: BaseModel) -> None:
        for name in ("request_options", "columns"):
            declared, actual = getattr(config, name, {}), getattr(bench.engine, name, {})
            assert actual == declared, f"the config declares {name} {declared}, but the engine has {actual}"
        options = {name: self.option_values[name] for name in getattr(config, "request_options", {})}
        plain = make_requests(8)
        requests = [*plain[:4], *(dataclasses.replace(each, options=options) for each in plain[4:])]
        done = {key: with_kinds(each, bench.engine) for key, each in bench.answers(requests).items()}
        if "temperature" in options:
            has_column = all("temperature" in done[each.sample_id].columns for each in requests[4:])
            assert has_column, "the column `temperature` must contain the request's temperature"
        gap = bench.gap_of(requests, done, PLAIN.temperature)
        assert gap <= self.log_prob_tolerance, f"log-probs at the request's temperature are {gap:.3g} nats off"

    def test_truncated_sampling_says_what_it_kept(self, bench: Bench) -> None:
        sampling = SamplingParams(max_new_tokens=6, top_k=3)
        requests = make_requests(6)
        answers = bench.answers(requests, sampling)
        for done in answers.values():
            assert done.support_ids is not None, "top_k requires support_ids in the completion"
            assert len(done.support_ids) == len(done.token_ids), "support_ids must have one set per token"
            for token, kept in zip(done.token_ids, done.support_ids, strict=True):
                assert token in kept and len(kept) >= 3, f"sampled token {token}, support_ids {list(kept)}"
        gap = bench.gap_of(requests, answers, 1.0)
        assert gap <= self.log_prob_tolerance, f"log-probs under top_k are {gap:.3g} nats off: renormalize them"

    def test_greedy_takes_the_likeliest(self, bench: Bench) -> None:
        import torch

        from rlhf_forward.logits import causal_lm_logits
        from rlhf_forward.logprobs import response_logits

        requests = make_requests(4)
        answers = bench.answers(requests, SamplingParams(max_new_tokens=6, greedy=True))
        for request in requests:
            batch = as_experience([(request.prompt_ids, answers[request.sample_id])])
            with torch.no_grad():
                logits = causal_lm_logits(bench.twin, batch.sequences, batch.attention_mask)
            logits = response_logits(logits, batch.num_actions)[0]
            taken = logits.gather(-1, batch.sequences[0, batch.prompt_length :, None])[:, 0]
            short = float((logits.amax(-1) - taken).max())
            assert short <= 1e-3, f"sample {request.sample_id}: chose a logit {short:.3g} below the maximum"
        assert bench.gap_of(requests, answers, 1.0) <= self.log_prob_tolerance, "greedy log-probs are at temperature 1"

    def test_a_sample_is_the_same_alone_and_again(self, bench: Bench) -> None:
        requests = make_requests(7)
        together = bench.answers(requests)
        again = bench.answers(list(reversed(requests)))
        if self.batch_invariant:
            alone = {r.sample_id: bench.answers([r])[r.sample_id] for r in requests}
            for sample_id, done in together.items():
                assert alone[sample_id].token_ids == done.token_ids, f"sample {sample_id} differs alone and in a batch"
                assert again[sample_id].token_ids == done.token_ids, f"sample {sample_id} differs in another order"

    def test_samples_of_one_prompt_differ(self, bench: Bench) -> None:
        answers = bench.answers(make_requests(8, same_prompt=True))
        assert len({done.token_ids for done in answers.values()}) > 1, "eight samples of one prompt are identical"

    def test_a_stop_text_ends_an_answer_and_stays_in_it(self, bench: Bench) -> None:
        (request,) = make_requests(1)
        whole = bench.answers([request], SamplingParams(max_new_tokens=8, greedy=True))[request.sample_id]
        stop = str(bench.tokenizer.decode([whole.token_ids[1]]))
        sampling = SamplingParams(max_new_tokens=8, greedy=True, stop=(stop,))
        done = bench.answers([request], sampling)[request.sample_id]
        cut = next(i for i, token in enumerate(whole.token_ids) if token == whole.token_ids[1]) + 1
        assert (done.token_ids, done.finish_reason) == (whole.token_ids[:cut], "stop"), (
            f"stop text {stop!r} in {whole.token_ids}: got {done.token_ids}, {done.finish_reason}"
        )

    def test_max_length_counts_the_prompt(self, bench: Bench) -> None:
        requests = make_requests(5)
        answers = bench.answers(requests, SamplingParams(max_new_tokens=8, max_length=11))
        for request in requests:
            total = len(request.prompt_ids) + len(answers[request.sample_id].token_ids)
            assert total <= 11, f"prompt and answer have {total} tokens, above max_length=11"

    def test_weights_changed_in_place(self, bench: Bench) -> None:
        perturb(bench.module, seed=1)
        bench.twin.load_state_dict({k: v.cpu() for k, v in bench.module.state_dict().items()})
        bench.engine.weights_updated(5)
        assert bench.engine.policy_version == 5, "weights_updated(5) must set policy_version to 5"
        self._check_weights(bench, 5)

    def test_requests_join_between_two_steps(self, bench: Bench) -> None:
        if not isinstance(bench.engine, InFlightEngine):
            return
        requests = make_requests(7)
        expected = bench.answers(requests)
        batches = [[(each, PLAIN) for each in part] for part in (requests[:3], (), (), requests[3:5], requests[5:])]
        answers = {
            each.sample_id: each for each in bench.engine.generate_in_flight(lambda: batches.pop(0) if batches else ())
        }
        assert sorted(answers) == sorted(expected), "each request needs one completion, also if it joins later"
        for sample_id, done in answers.items():
            assert not done.policy_versions, f"sample {sample_id} has a single version: leave policy_versions empty"
            if self.batch_invariant:
                assert done.token_ids == expected[sample_id].token_ids, f"sample {sample_id} differs when others join"

    def test_canceled_requests_yield_nothing(self, bench: Bench) -> None:
        engine = bench.engine
        if not isinstance(engine, InFlightEngine) or not hasattr(engine, "cancel"):
            return
        requests, calls = make_requests(4), 0
        expected = bench.answers(requests)
        canceled = max(expected.values(), key=lambda each: len(each.token_ids)).sample_id

        def between() -> Sequence[tuple[GenerationRequest, SamplingParams]]:
            nonlocal calls
            calls += 1
            if calls == 2:
                engine.cancel(canceled)
            return [(each, PLAIN) for each in requests] if calls == 1 else ()

        answers = {each.sample_id: each.token_ids for each in engine.generate_in_flight(between)}
        assert sorted(answers) == sorted(expected.keys() - {canceled}), "all but the canceled request must complete"
        if self.batch_invariant:
            for sample_id, token_ids in answers.items():
                assert token_ids == expected[sample_id].token_ids, (
                    f"sample {sample_id} differs when another is canceled"
                )

    def test_weights_between_two_steps(self, bench: Bench) -> None:
        """A running answer continues and reports the version of each token. Answers that start later use the new
        weights.
        """
        if not isinstance(bench.engine, InFlightEngine):
            return
        before = bench.engine.policy_version
        requests, later = make_requests(4), make_requests(4, first_id=200)
        weights, calls = _weights(bench, seed=4), 0

        def between() -> Sequence[tuple[GenerationRequest, SamplingParams]]:
            nonlocal calls
            calls += 1
            if calls == 4:
                replace_weights(bench.module, weights, before + 1)
                bench.engine.weights_updated(before + 1)
            return [(each, PLAIN) for each in {1: requests, 4: later}.get(calls, ())]

        answers = {each.sample_id: each for each in bench.engine.generate_in_flight(between)}
        assert bench.engine.policy_version == before + 1
        for done in (done for done in answers.values() if done.policy_versions):
            who = f"sample {done.sample_id} ({done.policy_versions})"
            assert len(done.policy_versions) == len(done.token_ids), f"{who}: needs one version per token"
            assert set(done.policy_versions) == {before, before + 1}, f"{who}: versions must be {before}, {before + 1}"
            assert list(done.policy_versions) == sorted(done.policy_versions), f"{who}: versions must not decrease"
            assert done.policy_version == before, f"{who}: policy_version must be the oldest"
        bench.twin.load_state_dict(weights, strict=False)
        started_later = {r.sample_id: answers[r.sample_id] for r in later}
        assert {done.policy_version for done in started_later.values()} == {before + 1}
        gap = bench.gap_of(later, started_later, PLAIN.temperature)
        assert gap <= self.log_prob_tolerance, f"answers of the new weights are {gap:.3g} nats off: is old state used?"

    def _check_weights(self, bench: Bench, version: int) -> None:
        requests = make_requests(6)
        answers = bench.answers(requests, WARM)
        assert {done.policy_version for done in answers.values()} == {version}
        gap = bench.gap_of(requests, answers, WARM.temperature)
        assert gap <= self.log_prob_tolerance, f"version {version}: {gap:.3g} nats off: are old weights used?"


def _weights(bench: Bench, *, seed: int) -> dict[str, Any]:
    """Another policy's weights by state-dict name, on the CPU."""
    from rlhf_core.rollout.weight_sync import named_weights

    other = copy.deepcopy(bench.twin)
    perturb(other, seed=seed)
    return {name: tensor.detach() for name, tensor in named_weights(other).items()}
