"""The official SDK against a server with a tiny model."""

import pytest
import tinker
from running_server import client, datum, rest, running
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    with running(base, tmp_path_factory.mktemp("service") / "output") as server:
        yield server


def test_learns_and_samples(server):
    with client(server) as service:
        (model,) = rest(server).get_server_capabilities().result(30).supported_models
        training = service.create_lora_training_client(base_model=model.model_name, rank=4, seed=1).result(60)
        tokens = [5, 6, 7, 8, 9, 10]
        data = [datum(tokens, weights=[1.0] * 5)]
        losses = []
        for _ in range(40):
            forward, step = training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)
            losses.append(forward.result(60).metrics["loss:sum"])
            step.result(60)
        assert losses[-1] < 0.2 * losses[0]
        sampler = training.save_weights_and_get_sampling_client().result(60)
        params = types.SamplingParams(max_tokens=4, temperature=0.0)
        answer = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, params).result(60)
        assert answer.sequences[0].tokens[:4] == [7, 8, 9, 10]
        assert answer.sequences[0].stop_reason == "length"
        base = service.create_sampling_client(base_model=model.model_name).result(60)
        other = base.sample(types.ModelInput.from_ints([5, 6]), 1, params).result(60)
        assert other.sequences[0].tokens != answer.sequences[0].tokens


def test_wrong_key(server):
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=server.address, api_key="tml-" + "x" * 32)
