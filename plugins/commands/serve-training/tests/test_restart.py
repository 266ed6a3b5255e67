"""A server that is killed during requests, and one that resumes it."""

import socket

import pytest
from running_server import LEFT_BY_THE_SDK, client, datum, new_client, rest, running
from tinker import types

pytestmark = [
    pytest.mark.slow,
    LEFT_BY_THE_SDK,
]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def steps(training, count):
    """Futures of pairs of requests, each with its own data and learning rate."""
    futures = []
    for index in range(count):
        data = [datum([5, 6 + index % 4, 7, 8 + index % 5], weights=[1.0, 0.5, 1.0])]
        futures.append(training.forward_backward(data, "cross_entropy"))
        futures.append(training.optim_step(types.AdamParams(learning_rate=1e-3 * (1 + index % 3))))
    return futures


def final(training):
    """Samples and a loss after a checkpoint."""
    training.save_state("end").result(120)
    params = types.SamplingParams(max_tokens=4, seed=3)
    sampler = training.save_weights_and_get_sampling_client().result(60)
    response = sampler.sample(types.ModelInput.from_ints([5, 6]), 2, params).result(60)
    logprobs = [each.logprobs for each in response.sequences]
    data = [datum([5, 6, 7, 8], weights=[1.0] * 3)]
    return logprobs, training.forward(data, "cross_entropy").result(60).metrics


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """Metrics of the requests and of the end, without a kill."""
    with running(base, tmp_path_factory.mktemp("quiet") / "output") as server, client(server) as service:
        training = service.create_lora_training_client(base_model=base, rank=4, seed=1).result(60)
        results = [each.result(120).metrics for each in steps(training, 5)]
        training.save_state("half").result(60)
        results += [each.result(120).metrics for each in steps(training, 20)]
        return results, final(training)


@pytest.mark.parametrize("limit", ["limits.state_seconds=1000", "limits.state_seconds=0.001"])
def test_killed_during_50_requests(base, tmp_path, undisturbed, limit):
    options = ("--port", free_port(), "--set", limit)
    with running(base, tmp_path / "output", *options) as first:
        service = new_client(first)
        training = service.create_lora_training_client(base_model=base, rank=4, seed=1).result(60)
        results = [each.result(120).metrics for each in steps(training, 5)]
        saved = training.save_state("half").result(60).path
        futures = steps(training, 20)
        futures[5].result(60)
        first.kill()
        with running(base, tmp_path / "output", *options) as second:
            results += [each.result(240).metrics for each in futures]
            end = final(training)
            names = [
                each.checkpoint_id for each in rest(second).list_checkpoints(training.model_id).result(30).checkpoints
            ]
            assert names[:2] == ["weights/half", "weights/end"]
            assert rest(second).get_weights_info_by_tinker_path(saved).result(30).lora_rank == 4
            # Which it is depends on whether requests waited when it was killed.
            assert "are carried out now" in second.text() or "were computed again" in second.text()
            service.close("success").result(60)
    assert results == undisturbed[0]
    assert end == undisturbed[1]  # a request done twice, or lost, would change the weights
