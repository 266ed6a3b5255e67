"""The official SDK against a server with a tiny model."""

import json
import time
import warnings

import httpx
import pytest
import tinker
from running_server import KEYS, LEFT_BY_THE_SDK, client, datum, rest, running_here
from tinker import types

from rlhf_dashboard.runs import Runs

pytestmark = LEFT_BY_THE_SDK
ADAM = types.AdamParams(learning_rate=1e-2)
TOKENS = [5, 6, 7, 8, 9, 10]
CE = [datum(TOKENS, weights=[1.0] * 5), datum([5, 6, 7], weights=[0.0, 1.0])]
RL = [datum(TOKENS, logprobs=[-2.5] * 5, advantages=[0, 0, 1.0, -1.0, 0.5])]
GSPO = [datum(TOKENS, logprobs=[-2.5] * 5, advantages=[0, 0, 1.0, -1.0, 0.5], sequence_ratio_mask=[0, 0, 1, 1, 1.0])]
PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    with running_here(base, tmp_path_factory.mktemp("service") / "output") as server:
        yield server


@pytest.fixture(scope="module")
def service(server):
    with client(server) as service:
        yield service


@pytest.fixture
def training(service, base):
    return service.create_lora_training_client(base_model=base, rank=4, seed=1).result(60)


def test_learns(server, training):
    (model,) = rest(server).get_server_capabilities().result(30).supported_models
    assert model.max_context_length is not None
    assert training.get_info().lora_rank == 4
    assert training.get_tokenizer().encode("12")
    losses = []
    for _ in range(15):
        forward, step = training.forward_backward(CE, "cross_entropy"), training.optim_step(ADAM)
        losses.append(forward.result(60).metrics["loss:sum"])
        assert step.result(60).metrics["grad_norm:max"] > 0
    assert losses[-1] < losses[0] - 0.5


def test_the_dashboard_lists_it(server, training):
    forward, step = training.forward_backward(CE, "cross_entropy"), training.optim_step(ADAM)
    loss = forward.result(60).metrics["loss:sum"]
    norm = step.result(60).metrics["grad_norm:max"]
    runs = Runs(server.output)
    (row,) = [each for each in runs.rows() if each["name"].endswith(training.model_id.replace(":", "-"))]
    assert (row["status"], row["algorithm"]) == ("running", "tinker (alice)")
    lines = runs.find(row["id"]).metrics.read_text().splitlines()
    (line,) = map(json.loads, lines)
    assert line["loss/policy"] == pytest.approx(loss, rel=1e-6)
    assert line["policy/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert (line["step"], line["time/train_s"] > 0) == (1, True)


@pytest.mark.parametrize(
    ("name", "data", "config"),
    [
        ("cross_entropy", CE, None),
        ("importance_sampling", RL, None),
        ("ppo", RL, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", RL, None),
        ("gspo", GSPO, None),
        ("dro", RL, {"beta": 0.1}),
    ],
)
def test_losses(training, name, data, config):
    forward = training.forward(data, name, config).result(60)
    both = training.forward_backward(data, name, config).result(60)
    assert forward.metrics == both.metrics
    assert [each["logprobs"].shape for each in both.loss_fn_outputs] == [[each.model_input.length] for each in data]
    training.optim_step(ADAM).result(60)
    assert training.forward(data, name, config).result(60).metrics["loss:sum"] < both.metrics["loss:sum"]


def test_a_custom_loss_is_the_same_loss(service, base, training):
    def loss(data, logprobs):
        weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
        return -sum((own * each).sum() for own, each in zip(weights, logprobs, strict=True)), {}

    other = service.create_lora_training_client(base_model=base, rank=4, seed=1).result(60)
    training.forward_backward(CE, "cross_entropy").result(60)
    other.forward_backward_custom(CE, loss).result(60)
    norms = [each.optim_step(ADAM).result(60).metrics["grad_norm:max"] for each in (training, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_long_batch_is_sent_in_chunks(training):
    data = [datum(TOKENS, weights=[0.01] * 5)] * 600
    result = training.forward_backward(data, "cross_entropy").result(120)
    assert len(result.loss_fn_outputs) == 600


def test_checkpoints(server, service, training):
    training.forward_backward(CE, "cross_entropy").result(60)
    training.optim_step(ADAM).result(60)
    path = training.save_state("first").result(60).path
    api = rest(server)
    info = api.get_weights_info_by_tinker_path(path).result(30)
    assert (info.lora_rank, info.train_unembed) == (4, False)
    other = service.create_training_client_from_state_with_optimizer(path).result(60)
    for each in (training, other):
        each.forward_backward(CE, "cross_entropy").result(60)
        each.optim_step(ADAM).result(60)
    losses = [each.forward(CE, "cross_entropy").result(60).metrics["loss:sum"] for each in (training, other)]
    assert losses[0] == losses[1]
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        training.save_state("first").result(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        training.load_state(path).result(60)
    assert training.forward(CE, "cross_entropy").result(60).metrics["loss:sum"] > losses[0]
    runs = api.list_training_runs().result(30).training_runs
    assert training.model_id in [each.training_run_id for each in runs]
    names = [each.checkpoint_id for each in api.list_checkpoints(training.model_id).result(30).checkpoints]
    assert names == ["weights/first"]
    api.delete_checkpoint_from_tinker_path(path).result(30)
    assert api.list_checkpoints(training.model_id).result(30).checkpoints == []


def test_an_adapter_is_downloaded(server, training):
    path = training.save_weights_external("export").result(60).path
    urls = rest(server).get_external_weights_urls(path).result(30).urls
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    url = urls["adapter_config.json"]
    assert httpx.get(url).json()["r"] == 4
    assert httpx.get(url.replace("/files/", "/files/0")).status_code == 403


def test_samples(service, training, base):
    for _ in range(10):
        training.forward_backward(CE[:1], "cross_entropy")
        training.optim_step(ADAM).result(60)
    path = training.save_weights_for_sampler("s").result(60).path
    trained = service.create_sampling_client(model_path=path).result(60)
    untrained = service.create_sampling_client(base_model=base).result(60)
    params = types.SamplingParams(max_tokens=5, seed=7)
    first, again, other = (
        each.sample(PROMPT, 3, params, topk_sample_logprobs=2).result(60) for each in (trained, trained, untrained)
    )
    assert [each.tokens for each in first.sequences] == [each.tokens for each in again.sequences]
    assert [each.logprobs for each in first.sequences] != [each.logprobs for each in other.sequences]
    assert len({tuple(each.tokens) for each in first.sequences}) > 1
    assert all(len(each.topk_logprobs[0]) == 2 for each in first.sequences)
    greedy = types.SamplingParams(max_tokens=5, temperature=0.0)
    tokens = trained.sample(PROMPT, 1, greedy).result(60).sequences[0].tokens
    ended = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[tokens[1]])
    stopped = trained.sample(PROMPT, 1, ended).result(60).sequences[0]
    assert stopped.tokens == tokens[: tokens.index(tokens[1]) + 1]
    assert stopped.stop_reason == "stop"
    # log-probs of sampling, of a prompt, and of training are of one distribution
    sequence = [5, 6, 7, *tokens]
    of_prompt = trained.compute_logprobs(types.ModelInput.from_ints(sequence)).result(60)
    training_data = [datum(sequence, weights=[1.0] * (len(sequence) - 1))]
    of_training = training.forward(training_data, "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].data
    assert of_prompt[0] is None
    assert of_prompt[1:] == pytest.approx(list(of_training), abs=1e-5)
    assert trained.compute_logprobs(types.ModelInput.from_ints([5])).result(60) == [None]
    of_samples = trained.sample(PROMPT, 1, greedy).result(60).sequences[0].logprobs
    assert of_samples == pytest.approx(of_prompt[3:], abs=1e-5)


def test_the_newest_unnamed_weights(training):
    params = types.SamplingParams(max_tokens=3, seed=1)
    first = training.save_weights_and_get_sampling_client().result(60).sample(PROMPT, 1, params).result(60)
    training.forward_backward(CE, "cross_entropy").result(60)
    training.optim_step(types.AdamParams(learning_rate=0.1)).result(60)
    second = training.save_weights_and_get_sampling_client().result(60).sample(PROMPT, 1, params).result(60)
    assert first.sequences[0].logprobs != second.sequences[0].logprobs


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda training: training.optim_step(ADAM), "there are no gradients for a step"),
        (
            lambda training: training.forward(RL, "stable_reinforce"),
            "its formula is not published. Offered: cross_entropy",
        ),
        (
            lambda training: training.forward([datum([5, 999], weights=[1.0])], "cross_entropy"),
            "the token 999 does not",
        ),
        (lambda training: training.forward([datum([5] * 4000, weights=[1.0] * 3999)], "cross_entropy"), "context"),
        (lambda training: training.save_state("../x"), "a checkpoint's name has"),
    ],
)
def test_failures_are_named_and_the_model_continues(training, act, message):
    with pytest.raises(tinker.RequestFailedError, match=message):
        act(training).result(60)
    training.forward(CE, "cross_entropy").result(60)


def test_refusals_are_named(server, service, base):
    with pytest.raises(tinker.AuthenticationError):
        tinker.RestClient(base_url=server.address, api_key="tml-" + "x" * 32).list_sessions().result(30)
    with pytest.raises(tinker.NotFoundError, match="does not exist: this server has"):
        service.create_lora_training_client(base_model="other/model", rank=4).result(60)
    with pytest.raises(tinker.BadRequestError, match="the rank 9 is not between 1 and 8"):
        service.create_lora_training_client(base_model=base, rank=9).result(60)
    with pytest.raises(tinker.NotFoundError, match="does not offer billing"):
        headers = {"X-API-Key": KEYS["alice"]}
        response = httpx.get(f"{server.address}/api/v1/billing/usage/events", headers=headers)
        assert response.json()["category"] == "user"
        raise tinker.NotFoundError(response.json()["error"], response=response, body=None)


def test_another_tenant_sees_nothing(server, training):
    path = training.save_weights_for_sampler("secret").result(60).path
    bob = rest(server, "bob")
    for act in (
        lambda: bob.get_training_run(training.model_id),
        lambda: bob.get_weights_info_by_tinker_path(path),
        lambda: bob.list_checkpoints(training.model_id),
        lambda: bob.delete_checkpoint_from_tinker_path(path),
    ):
        with pytest.raises(tinker.NotFoundError):
            act().result(30)
    assert bob.list_sessions().result(30).sessions == []
    with client(server, "bob") as service, pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path=path).result(30)
    headers = {"X-API-Key": KEYS["bob"]}
    body = {"request_id": f"{training.model_id}:1"}
    assert httpx.post(f"{server.address}/api/v1/retrieve_future", json=body, headers=headers).status_code == 404
    body = {"model_id": training.model_id, "seq_id": 2, "adam_params": {}, "type": "optim_step"}
    assert httpx.post(f"{server.address}/api/v1/optim_step", json=body, headers=headers).status_code == 404


def test_a_request_that_is_sent_twice_is_done_once(server, training):
    training.forward_backward(CE, "cross_entropy").result(60)
    headers = {"X-API-Key": KEYS["alice"]}
    body = {"model_id": training.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}, "type": "optim_step"}
    ids = {
        httpx.post(f"{server.address}/api/v1/optim_step", json=body, headers=headers).json()["request_id"]
        for _ in range(3)
    }
    (request_id,) = ids
    answers = [
        httpx.post(
            f"{server.address}/api/v1/retrieve_future", json={"request_id": request_id}, headers=headers, timeout=40
        )
        for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    assert "metrics" in answers[0].json()


def test_a_waiting_sample_is_canceled(server, service, base):
    sampler = service.create_sampling_client(base_model=base).result(60)
    params = types.SamplingParams(max_tokens=200)
    many = [sampler.sample(PROMPT, 64, params) for _ in range(4)]
    time.sleep(0.3)
    headers = {"X-API-Key": KEYS["alice"]}
    owner = sampler._sampling_session_id
    body = {"request_id": f"{owner}:request:3"}
    assert httpx.post(f"{server.address}/api/v1/cancel_future", json=body, headers=headers).status_code == 200
    with pytest.raises(tinker.RequestFailedError, match="canceled"):
        many[3].result(120)
    assert many[0].result(120).sequences
