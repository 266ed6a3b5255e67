"""A run folder, and ranks that need no process: what the parts of a session ask of a strategy."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rlhf_core.runfolder.folder import RunFolder


@dataclass
class Rank:
    """One rank of a strategy; what rank 0 would broadcast is put into `said` for the others."""

    rank: int = 0
    num_processes: int = 1
    said: list[Any] = field(default_factory=list)

    @property
    def is_main(self):
        return self.rank == 0

    def all_reduce(self, tensor, op):
        """The largest of this rank's flags and of rank 0's, whose first is up where it has something to say."""
        assert op == "max"
        return torch.maximum(tensor, torch.tensor([float(bool(self.said)), 0.0]))

    def broadcast_object(self, value):
        if self.is_main:
            return value
        return self.said.pop(0)


@pytest.fixture
def make_rank():
    return Rank


@pytest.fixture
def folder(tmp_path):
    with RunFolder.take(tmp_path / "run") as folder:
        folder.write_manifest({"events": []})
        yield folder
