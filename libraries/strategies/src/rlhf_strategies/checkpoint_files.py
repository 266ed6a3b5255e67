"""Writes the files of a checkpoint, at once or later from a copy of their content."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rlhf_core.errors import CheckpointError


class CheckpointFiles:
    """Writes files at once."""

    def snapshot(self, tree: Any) -> Any:
        """Return what `write` may still read after training has continued: the tree itself, since it is written now.

        Args:
            tree: Tensors in dicts, lists and tuples, and plain values.
        """
        return tree

    def write(self, action: Callable[[], object]) -> None:
        """Run an action that writes a file.

        Args:
            action: Reads only snapshots. Actions run in the order of these calls.
        """
        action()


class DeferredFiles(CheckpointFiles):
    """Keeps copies in host memory and writes the files when `run` is called, in another thread.

    Example:
        >>> files, written = DeferredFiles(), []
        >>> files.write(lambda: written.append("weights"))
        >>> written
        []
        >>> files.run()
        >>> written
        ['weights']
    """

    def __init__(self) -> None:
        """Create an empty list of files."""
        self._actions: deque[Callable[[], object]] = deque()
        self.is_cancelled = False
        """Set by another thread, so that `run` ends after the current action."""

    def snapshot(self, tree: Any) -> Any:
        """Return a copy with all tensors in host memory."""
        if isinstance(tree, torch.Tensor):
            return tree.detach().to("cpu", copy=True)
        if isinstance(tree, dict):
            return {key: self.snapshot(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self.snapshot(value) for value in tree)
        return tree

    def write(self, action: Callable[[], object]) -> None:
        """Keep the action for `run`."""
        self._actions.append(action)

    def run(self) -> None:
        """Run the actions. The memory of each one is freed when it is done.

        Raises:
            CheckpointError: `is_cancelled` was set.
        """
        while self._actions and not self.is_cancelled:
            self._actions.popleft()()
        if self.is_cancelled:
            raise CheckpointError("it was cancelled")
