"""A writer of GGUF files that accepts empty arrays."""

from __future__ import annotations

import struct
from typing import Any

from gguf import GGUFValueType, GGUFWriter


class Writer(GGUFWriter):
    """Writes a GGUF file.

    A vocabulary of characters does not have merges. llama.cpp needs their array nonetheless, and the package gguf
    refuses to write an empty one. Each array with a type may be empty here.
    """

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        if vtype == GGUFValueType.ARRAY and len(val) == 0 and sub_type is not None:
            return (struct.pack("<I", vtype) if add_vtype else b"") + struct.pack("<IQ", sub_type, 0)
        return super()._pack_val(val, vtype, add_vtype, sub_type)
