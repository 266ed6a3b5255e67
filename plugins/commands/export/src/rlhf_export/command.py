"""`rlhf export`: writes a policy as a plain model folder or a GGUF file, and uploads it to the hub."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .model import Dtype


@click.command("export")
@click.argument("source", metavar="RUN|CHECKPOINT|MODEL", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "target", metavar="DIR", type=click.Path(path_type=Path), help="The new model folder.")
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
    repo: str | None,
    private: bool,
    revision: str | None,
    message: str | None,
    timeout_minutes: float,
    merge_lora: bool,
    dtype: Dtype | None,
) -> None:
    """Write a policy as a folder that transformers loads, and upload it to the Hugging Face hub.

    Of a run, --to writes the newest checkpoint, and --push uploads the final model if the run has one. The folder
    includes the tokenizer and a model card. Checkpoints of all strategies are supported. A run that was finished or
    stopped already has its model in model/.

    The token for --push is that of HF_TOKEN or of `hf auth login`. Hidden files are not uploaded.

    \b
    Examples:
      rlhf export runs/first --to my-model
      rlhf export runs/first/checkpoints/step-200 --to my-model --dtype bfloat16
      rlhf export runs/lora --to my-model --merge-lora
      rlhf export runs/first --push my-name/my-model --private
    """
    from rlhf_core.errors import UserInputError
    from rlhf_core.util import printable

    from .model import export_model, final_model

    if target is None and repo is None:
        raise UserInputError("there is nothing to do", where="rlhf export", hint="add --to DIR or --push OWNER/NAME")
    if repo is None and (private or revision is not None or message is not None):
        raise UserInputError(
            "--private, --revision and --message need --push", where="rlhf export", hint="add --push OWNER/NAME"
        )
    if repo is not None:
        from .push import check_name, push_folder

        check_name(repo)
    if target is not None:
        exported = export_model(source, target, merge_lora=merge_lora, dtype=dtype)
        click.echo(printable(f"{target}: the policy of {exported}"))
    if repo is None:
        return
    with ExitStack() as stack:
        folder = target if target is not None or dtype is not None else final_model(source, merge_lora=merge_lora)
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="rlhf-export-"))) / "model"
            exported = export_model(source, folder, merge_lora=merge_lora, dtype=dtype)
        else:
            exported = folder
        address = push_folder(
            folder,
            repo,
            private=private,
            revision=revision,
            message=message,
            timeout_seconds=60 * timeout_minutes,
        )
        click.echo(printable(f"{address}: the policy of {exported}"))
