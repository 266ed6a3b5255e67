"""The hook plugin `sample-images`: keeps small copies of the images of samples in the run folder, for pages."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.components import HookContext
from rlhf_core.config import Section
from rlhf_core.errors import first_line
from rlhf_core.hookspecs import hookimpl
from rlhf_core.types import RolloutGroup
from rlhf_images import KEY, ImageError, ImageReference, png_bytes
from rlhf_pages import MAX_PICTURE_BYTES, picture_path

logger = logging.getLogger("rlhf.vision")
_MAX_EDGE = 256
_MAX_PICTURES = 2000
"""Maximum number of pictures in a run folder."""


class SampleImages:
    """Writes each image of a prompt once, reduced to 256 pixels, in the process that samples its answers."""

    def __init__(self, config: Section, context: HookContext) -> None:
        """Create the hook. It writes nothing if the run keeps no samples, or its folder is on another machine."""
        keeps = context.run.get("logging", {}).get("samples") != "none" and context.run_folder.is_dir()
        self._run_folder = context.run_folder if keeps else None
        self._written: set[str] = set()

    @hookimpl
    def rlhf_make_experience_end(self, groups: Sequence[RolloutGroup] | None) -> None:
        if self._run_folder is None:
            return
        for group in groups or ():
            for reference in group.rollouts[0].metadata.get(KEY) or () if group.rollouts else ():
                if isinstance(reference, ImageReference) and not self._keep(reference, self._run_folder):
                    self._run_folder = None
                    return

    def _keep(self, reference: ImageReference, folder: Path) -> bool:
        """Write a picture, unless it exists. Return whether more may follow."""
        name = reference["sha256"][:16]
        if name in self._written:
            return True
        path = picture_path(folder, name)
        if len(self._written) >= _MAX_PICTURES:
            logger.info("%s has %d pictures of samples, and gets no more", path.parent, _MAX_PICTURES)
            return False
        self._written.add(name)
        try:
            if not path.exists() and len(data := png_bytes(reference.open(), max_edge=_MAX_EDGE)) <= MAX_PICTURE_BYTES:
                path.parent.mkdir(exist_ok=True)
                part = path.with_suffix(f".{os.getpid()}.part")
                part.write_bytes(data)
                part.replace(path)
        except ImageError as error:  # the file has changed since its prompt was encoded
            logger.warning("the picture %s of a sample is not kept: %s", name, error.message)
        except OSError as error:
            logger.warning("pictures of samples are not kept: %s", first_line(error))
            return False
        return True
