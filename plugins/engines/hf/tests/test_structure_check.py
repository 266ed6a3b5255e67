"""Structures of clients that take hours to compile end with the process that compiles them."""

from contextlib import closing

import pytest

from rlhf_core.errors import DataError
from rlhf_forward import Structure, byte_tokens, compile_structure
from rlhf_hf.structure_check import StructureCheck

pytest.importorskip("llguidance")

HOURS = Structure("json_schema", '{"type":"integer","multipleOf":99999989}')


@pytest.mark.slow
def test_a_structure_that_compiles_for_hours_is_refused_and_the_next_one_is_checked():
    with closing(StructureCheck(check_seconds=3.0)) as check:
        check.check(Structure("regex", "yes|no"), 300)
        with pytest.raises(DataError, match="the json_schema of the option structure was not compiled within 3 second"):
            check.check(HOURS, 300)
        check.check(Structure("lark", 'start: <[299]> "a"'), 300)
        with pytest.raises(DataError, match=r"the regex of the option structure is invalid"):
            check.check(Structure("regex", "(1"), 300)


def test_a_token_beyond_the_vocabulary_is_invalid():
    with pytest.raises(DataError, match="Token range end too large"):
        compile_structure(Structure("lark", "start: <[300]>"), byte_tokens(300), where="test")


def test_the_engine_compiles_what_the_check_accepts(model, engine, monkeypatch):
    checked = []
    monkeypatch.setattr(StructureCheck, "check", lambda self, structure, size: checked.append(structure.text))
    made = engine(model("llama"))
    for _ in range(2):
        made.check_options({"structure": {"regex": "1+"}})
    made.check_options({})
    assert checked == ["1+"], "a structure is checked once"
