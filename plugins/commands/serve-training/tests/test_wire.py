"""Messages against the SDK's own converters."""

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from rlhf_serve_training.wire import (
    InvalidRequest,
    Sampled,
    forward_output,
    forward_request,
    parse_forward,
    sample_output,
)


def sent(data, loss="cross_entropy", config=None):
    inner = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(forward_backward_input=inner, model_id="m", seq_id=3)
    return parse_forward(forward_backward_request_to_proto(request).SerializeToString())


def datum(tokens, **fields):
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=fields)


def test_reads_rows_and_options():
    message = sent([datum([1, 2], target_tokens=[2, 3], weights=[0.5, 1.0])], config={"a": 1.5, "b": "text"})
    assert (message.model_id, message.seq_id) == ("m", 3)
    order = forward_request(message)
    (row,) = order.rows
    assert order.config == {"a": 1.5, "b": "text"}
    assert row.token_ids.tolist() == [1, 2]
    assert row.fields["target_tokens"].tolist() == [2, 3]
    assert row.fields["weights"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("width", [3, 200])
def test_reads_several_targets_per_position_dense_and_sparse(width):
    targets, weights = torch.zeros(2, width, dtype=torch.int64), torch.zeros(2, width)
    targets[0, 1], targets[1, 0], targets[1, 2], weights[0, 1], weights[1, 2] = 5, 6, 7, 0.5, 0.25
    (row,) = forward_request(sent([datum([1, 2], target_tokens=targets, weights=weights)])).rows
    assert row.num_targets == width
    assert row.fields["target_tokens"].tolist() == targets.tolist()
    assert row.fields["weights"].tolist() == weights.tolist()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([datum([1, 2], weights=[1.0, 1.0])], "datum 0: loss_fn_inputs lacks target_tokens"),
        ([datum([1, 2], target_tokens=[2, 3], weights=[1.0])], "datum 0: weights has the shape"),
        ([datum([1, 2, 3], target_tokens=[2, 3], weights=[1.0, 1.0])], "datum 0: .* and 3 tokens were sent"),
        ([datum([1, 2], target_tokens=[2, 3], weights=[1.0, float("nan")])], "not finite"),
        ([datum([], target_tokens=[])], "model_input has no tokens"),
    ],
)
def test_refuses_by_name(data, message):
    with pytest.raises(InvalidRequest, match=message):
        forward_request(sent(data))


@pytest.mark.parametrize(
    "shapes",
    [
        [(2**20, 2**20), (-(2**20), 2**20)],  # a negative size does not make room for another tensor
        [(2**20, 2**20), (2**62,) * 40 + (0,)],  # nor does a product that is not a number
        [(2**62, 2**62)],
    ],
)
def test_refuses_shapes_that_would_fill_the_memory(shapes):
    message = sent([datum([1, 2], target_tokens=[2, 3])] * len(shapes))
    for each, shape in zip(message.data, shapes, strict=True):
        tensor = each.loss_fn_inputs["target_tokens"]
        tensor.Clear()
        tensor.dtype, tensor.sparse_csr.values = pb.DTYPE_INT64, b""
        tensor.shape.extend(shape)
    with pytest.raises(InvalidRequest, match="more than|the shape"):
        forward_request(message)


@pytest.mark.parametrize("shape", [(2, 0), (2, 1, 1)])
def test_refuses_targets_of_another_form(shape):
    message = sent([datum([1, 2], target_tokens=[2, 3])])
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.dense = tensor.dense if 0 not in shape else b""
    tensor.ClearField("shape")
    tensor.shape.extend(shape)
    with pytest.raises(InvalidRequest, match="target_tokens has the shape"):
        forward_request(message)


def test_refuses_other_bytes():
    with pytest.raises(InvalidRequest):
        parse_forward(b"\xff\xff\xff")


def test_inconsistent_sparse_indices_are_refused():
    targets = torch.zeros(2, 100, dtype=torch.int64)
    targets[0, 3] = 5
    message = sent([datum([1, 2], target_tokens=targets, weights=targets.float())])
    csr = message.data[0].loss_fn_inputs["target_tokens"].sparse_csr
    csr.col_indices = np.full_like(np.frombuffer(csr.col_indices, dtype=np.int64), 100).tobytes()
    with pytest.raises(InvalidRequest, match="outside of its shape"):
        forward_request(message)


def test_outputs_are_read_by_the_sdk():
    rows = [
        {"logprobs": np.asarray([-1.0, -2.0], np.float32)},
        {"logprobs": np.ones((2, 3), np.float32)},
        {"logprobs": np.ones((1, 3), np.float32)},
    ]
    output = deserialize_forward_backward_output(forward_output(rows, {"loss:sum": 2.5}))
    assert output.metrics == {"loss:sum": 2.5}
    assert [each["logprobs"].shape for each in output.loss_fn_outputs] == [[2], [2, 3], [1, 3]]
    assert list(output.loss_fn_outputs[0]["logprobs"].data) == [-1.0, -2.0]


def test_samples_are_read_by_the_sdk():
    sampled = [Sampled([4, 5], [-0.5, -0.25], True, [{4: -0.5, 7: -1.0}, {5: -0.25}]), Sampled([4], [-0.5], False)]
    nan = float("nan")
    response = deserialize_sample_response(sample_output(sampled, [nan, -1.0], [{}, {3: -2.0}]))
    first, second = response.sequences
    assert (first.tokens, first.stop_reason, second.stop_reason) == ([4, 5], "stop", "length")
    assert first.logprobs == [-0.5, -0.25]
    assert first.topk_logprobs == [[(4, -0.5), (7, -1.0)], [(5, -0.25)]]
    assert response.prompt_logprobs == [None, -1.0]
    assert response.topk_prompt_logprobs == [None, [(3, -2.0)]]


def test_a_sparse_tensor_that_would_fill_memory_is_refused():
    targets = torch.zeros(2, 100, dtype=torch.int64)
    message = sent([datum([1, 2], target_tokens=targets, weights=targets.float())] * 3)
    for each in message.data:
        for tensor in each.loss_fn_inputs.values():
            tensor.shape[1] = 2**24
    with pytest.raises(InvalidRequest, match="values in all tensors together"):
        forward_request(message)
