"""Structures of answers: bounded compilation of hostile ones, and the columns that carry them."""

import json
import threading

import pytest
import torch

from rlhf_core.columns import Columns
from rlhf_core.errors import DataError
from rlhf_forward import STRUCTURE_COLUMNS, Structure, allowed_logits, read_structure, structure_columns, vocabulary_of
from rlhf_forward.structure_columns import _answers, _unpack
from rlhf_testing.episodes import CHARACTERS
from rlhf_testing.models import tiny_tokenizer

pytest.importorskip("llguidance")

NUM_RULES = 500
RULES = {f"r{n}": {"type": "array", "items": {"$ref": f"#/$defs/r{(n + 1) % NUM_RULES}"}} for n in range(NUM_RULES)}
NESTED = '{"items":' * 3_000 + "{}" + "}" * 3_000


@pytest.fixture(scope="module")
def vocabulary():
    return vocabulary_of(tiny_tokenizer(CHARACTERS), [2])


def test_a_long_chain_of_rules_does_not_exhaust_the_stack(vocabulary):
    schema = json.dumps({"$defs": RULES, "$ref": "#/$defs/r0"}, separators=(",", ":"))
    answer = vocabulary.answer(Structure("json_schema", schema), where="test")
    found = []

    def run():  # on a thread with a stack of the usual size
        for token in tiny_tokenizer(CHARACTERS).encode("[" * 50):
            found.append(answer.allowed()[token // 8] >> token % 8 & 1)
            answer.add(token)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [1] * 50


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure("json_schema", NESTED), "recursion limit"),
        (Structure("json_schema", '{"$ref": "file:///etc/hosts"}'), "not present in a registry"),
        (Structure("json_schema", '{"$ref": "#"}'), "NoExtension"),
        (Structure("regex", "(" * 5_000 + ")" * 5_000), "invalid regex"),
        (Structure("lark", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000), "too deeply nested"),
        (Structure("lark", "start: <[99999]>"), "Token range end too large"),
    ],
    ids=lambda each: "" if isinstance(each, Structure) else each,
)
def test_a_hostile_structure_is_an_error(structure, message, vocabulary):
    with pytest.raises(DataError, match=message):
        vocabulary.answer(structure, where="test")


def test_columns_carry_the_structure_through_padding_and_concatenation():
    """Of two answers in one row, with free tokens between them, in a batch that is wider than the row."""
    one, other = Structure("regex", "é+" * 40), Structure("lark", 'start: "x"\n')
    parts = [Columns(structure_columns(each, [2, 7], n), STRUCTURE_COLUMNS) for each, n in ((one, 3), (other, 40))]
    width = max(len(each["structure_text"][0]) for each in parts) + 5
    places, text = torch.zeros(50, dtype=torch.int32), torch.zeros(50, width, dtype=torch.uint8)
    for start, part in zip((0, 5), parts, strict=True):
        bytes_of_part = part["structure_text"]
        places[start : start + len(bytes_of_part)] = part["structure"]
        text[start : start + len(bytes_of_part), : bytes_of_part.shape[1]] = bytes_of_part
    found = list(_answers(places.tolist()))
    assert found == [(0, 3), (5, 45)]
    assert [_unpack(text[start:end]) for start, end in found] == [(one, [2, 7]), (other, [2, 7])]


@pytest.mark.parametrize("size", [3, 8, 21])
def test_tokens_without_a_bit_are_not_allowed(size):
    logits = torch.randn(2, size)
    found = allowed_logits(logits, [bytes([0b0000_0101]), None])
    assert found[0].isfinite().nonzero().flatten().tolist() == [0, 2]
    torch.testing.assert_close(found[1], logits[1])


def test_a_schema_is_read_from_a_file(tmp_path):
    (tmp_path / "form.json").write_text('{"type": "integer"}', encoding="utf-8")
    assert read_structure({"file": str(tmp_path / "form.json")}) == {"json_schema": {"type": "integer"}}
    (tmp_path / "form.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read"):
        read_structure({"file": str(tmp_path / "form.json")})
