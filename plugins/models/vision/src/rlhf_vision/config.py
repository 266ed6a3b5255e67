"""Options of the prompt sources, and the types of models that the kind `image-text` loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field

from rlhf_core.config import Problem, PromptsConfig, ResolvedRun
from rlhf_images import ImageLimits, is_known_kind
from rlhf_web import allowed_host

TINY = "builtin:tiny-vision"
FAMILIES: Mapping[str, str] = {
    "llava": "families.llava:Llava",
    "idefics3": "families.idefics3:Idefics3",
    "smolvlm": "families.idefics3:Idefics3",
    "gemma3": "families.gemma3:Gemma3",
    "qwen2_vl": "families.qwen_vl:QwenVL",
    "qwen2_5_vl": "families.qwen_vl:QwenVL",
    "qwen3_vl": "families.qwen_vl:QwenVL",
    "internvl": "families.internvl:InternVL",
}
"""`model_type` of a `config.json` -> module and class of its family."""


def _is_missing_folder(path: str) -> bool:
    """Return whether a path is that of a folder which another run may write. Names of the hub have one slash."""
    return (path.count("/") > 1 or path.startswith((".", "~"))) and not Path(path).exists()


class SeenPrompts(PromptsConfig):
    """Base of sources whose prompts have images."""

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Report a model that would read the markers of images as text."""
        path = run.run.model.path
        if not is_known_kind(path) and not _is_missing_folder(path):
            yield Problem(
                "name",
                f"gives prompts with images, but {path!r} is not known as a model that sees",
                f"use a folder of one of the types {', '.join(FAMILIES)}, or {TINY}. Download a model of the hub first",
            )


class ImagesConfig(SeenPrompts):
    """Another source, whose records have images: image parts of chat messages, or a key `images`."""

    of: dict[str, Any] = Field(
        description="The source to read: its name and options, such as {name: jsonl, path: train.jsonl}."
    )
    adapt_reasons: ClassVar[Mapping[str, str]] = {
        "require_images": "with several trainers, each needs an image in every batch"
    }

    require_images: bool = Field(
        False,
        description="Refuse prompts without an image. Always on if several processes train together, since each needs "
        "an image in every batch.",
    )
    folder: str | None = Field(
        None,
        min_length=1,
        description="Folder of relative paths of images. Images outside of it are refused. null is the folder of the "
        "source's `path`, or the current folder.",
    )
    limits: ImageLimits = Field(ImageLimits(), description="Bounds on each image.")
    allow_hosts: list[Annotated[str, AfterValidator(allowed_host)]] = Field(
        [],
        description="Hosts from which images with http and https addresses are downloaded, once each, into the user's "
        "cache. *.NAME allows the subdomains of a name, and * all hosts. One with a private address must be named.",
    )

    def selections(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        yield "prompts", "of", dict(self.of)

    def downloads(self) -> Callable[[str], bytes] | None:
        """Return what downloads images of allowed hosts, also for observations and agents. None if there are none."""
        from .downloads import ImageDownloads

        return ImageDownloads(self.allow_hosts, self.limits) if self.allow_hosts else None

    def adapt(self, run: ResolvedRun) -> Self:
        """Require images in runs with several trainers."""
        adapted = super().adapt(run)
        processes = run.own_processes
        if processes is None or processes.trainers < 2:
            return adapted
        return adapted.model_copy(update={"require_images": True})

    def with_selections(self, selected: Sequence[Mapping[str, Any]]) -> ImagesConfig:
        chosen = {key: value for key, value in selected[0].items() if key in {"name", *self.of}}
        return self.model_copy(update={"of": chosen})


class DrawnDigitsConfig(SeenPrompts):
    """Pictures of a digit, 32 x 32 pixels, and the question which digit it is."""

    size: int = Field(10_000, ge=1, le=10**9, description="Number of different pictures.")
    picture_seed: int = Field(0, ge=0, description="Selects the pictures, independent of the run's seed.")
    shift: int = Field(1, ge=0, le=5, description="Maximum distance of a digit from the center, in pixels.")
    noise: float = Field(0.05, ge=0, le=1, description="Standard deviation of the noise of each pixel.")
    misread: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the completions (for `sft`) of digits above 2 that name the next digit instead, as by a "
        "teacher that misreads. Answers, by which rewards judge, are always right.",
    )
    shuffled: bool = Field(
        False, description="Whether each picture belongs to another problem, for a control run that cannot learn."
    )
