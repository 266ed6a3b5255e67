"""`rlhf export`: writes a policy as a plain model folder or a GGUF file, and uploads it to the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .model import Dtype


@click.command("export")
@click.argument("source", metavar="RUN|CHECKPOINT|MODEL", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "target", metavar="DIR", type=click.Path(path_type=Path), help="The new model folder.")
@click.option("--gguf", metavar="FILE", type=click.Path(path_type=Path), help="The new GGUF file, for llama.cpp.")
@click.option("--push", "repo", metavar="OWNER/NAME", help="Upload the model folder to the Hugging Face hub.")
@click.option("--private", is_flag=True, help="With --push: create a private repository.")
@click.option("--revision", metavar="BRANCH", help="With --push: the branch, which is created.  [default: main]")
@click.option("--message", metavar="TEXT", help="With --push: the message of the commit.")
@click.option(
    "--timeout",
    "timeout_minutes",
    type=click.FloatRange(min=0, min_open=True, max=10_080),
    default=360.0,
    show_default=True,
    help="With --push: minutes after which the upload is given up.",
)
@click.option("--merge-lora", is_flag=True, help="For a LoRA run, write the whole model, not only its adapter.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the stored weights.  [default: as they were trained]",
)
def export(
    source: Path,
    target: Path | None,
    gguf: Path | None,
    repo: str | None,
    private: bool,
    revision: str | None,
    message: str | None,
    timeout_minutes: float,
    merge_lora: bool,
    dtype: Dtype | None,
) -> None:
    """Write a policy as a folder that transformers loads or as a GGUF file, and upload it to the Hugging Face hub.

    Of a run, --to writes the newest checkpoint. --gguf and --push take the final model if the run has one. The folder
    includes the tokenizer and a model card. Checkpoints of all strategies are supported. A run that was finished or
    stopped already has its model in model/.

    --gguf needs rlhf-export[gguf], and supports causal LMs of llama, qwen2 and qwen3 with byte-level BPE.

    The token for --push is that of HF_TOKEN or of `hf auth login`. Hidden files are not uploaded.

    \b
    Examples:
      rlhf export runs/first --to my-model
      rlhf export runs/first/checkpoints/step-200 --to my-model --dtype bfloat16
      rlhf export runs/lora --to my-model --merge-lora
      rlhf export runs/first --gguf my-model.gguf --dtype float16
      rlhf export runs/first --push my-name/my-model --private
    """
    from rlhf_core.util import printable

    from .model import export_model

    _check(target, gguf, repo, has_push_options=private or revision is not None or message is not None)
    if target is not None:
        exported = export_model(source, target, merge_lora=merge_lora, dtype=dtype)
        click.echo(printable(f"{target}: the policy of {exported}"))
    if gguf is not None:
        from .gguf_file import write_gguf

        with _model_folder(source, None, merge_lora=True, dtype=None) as (folder, exported):
            write_gguf(folder, gguf, dtype)
            click.echo(printable(f"{gguf}: the policy of {exported}"))
    if repo is not None:
        from .push import push_folder

        with _model_folder(source, target, merge_lora=merge_lora, dtype=dtype) as (folder, exported):
            address = push_folder(
                folder,
                repo,
                private=private,
                revision=revision,
                message=message,
                timeout_seconds=60 * timeout_minutes,
            )
            click.echo(printable(f"{address}: the policy of {exported}"))


def _check(target: Path | None, gguf: Path | None, repo: str | None, *, has_push_options: bool) -> None:
    """Check the options before anything is written. Raises `UserInputError`."""
    from rlhf_core.errors import UserInputError

    if target is None and gguf is None and repo is None:
        hint = "add --to DIR, --gguf FILE or --push OWNER/NAME"
        raise UserInputError("there is nothing to do", where="rlhf export", hint=hint)
    if repo is None and has_push_options:
        raise UserInputError(
            "--private, --revision and --message need --push", where="rlhf export", hint="add --push OWNER/NAME"
        )
    if repo is not None:
        from .push import check_ready

        check_ready(repo)
    if gguf is not None:
        from .gguf_file import check_target

        check_target(gguf, target)


@contextmanager
def _model_folder(
    source: Path, target: Path | None, *, merge_lora: bool, dtype: Dtype | None
) -> Iterator[tuple[Path, Path]]:
    """Context with a folder of the model, which is temporary unless one exists, and the path that it comes from."""
    from .model import export_model, final_model

    if target is None and dtype is None:
        target = final_model(source, merge_lora=merge_lora)
    if target is not None:
        yield target, target
        return
    with TemporaryDirectory(prefix="rlhf-export-") as temporary:
        folder = Path(temporary) / "model"
        yield folder, export_model(source, folder, merge_lora=merge_lora, dtype=dtype)
