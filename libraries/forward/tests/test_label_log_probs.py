"""Log-probs of labels that are not the next tokens, in padded and in packed passes."""

import pytest
import torch

from rlhf_core.place import LocalPlace
from rlhf_forward import PlacePasses, label_log_probs
from rlhf_testing.models import tiny_model

IDS = torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]])
MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])
LABELS = torch.tensor([9, 4, 4, 5, 6, 7])


@pytest.mark.parametrize(
    "passes", ["rlhf_core.models.forward_passes:ForwardPasses", "rlhf_passes.fast_passes:FastPasses"]
)
def test_labels_of_all_positions(passes):
    model = tiny_model()
    place = LocalPlace(torch.device("cpu"), torch.float32)
    place.passes = passes
    with torch.no_grad():
        logits = torch.cat([model(IDS[:1]).logits[0], model(IDS[1:, :2]).logits[0]])
        expected = logits.log_softmax(-1).gather(-1, LABELS[:, None])[:, 0]
        with PlacePasses(place, model).applied():
            found = label_log_probs(model, IDS, MASK, MASK, LABELS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_labels_of_some_positions_have_gradients():
    model, is_read = tiny_model(), MASK.clone()
    is_read[0, :2] = False
    found = label_log_probs(model, IDS, MASK, is_read, LABELS[2:])
    assert found.shape == (4,)
    found.sum().backward()
    assert model.get_input_embeddings().weight.grad is not None
