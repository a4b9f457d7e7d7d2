"""The trained model on the Hugging Face Hub: pushed once, by whoever saved it, when training has ended."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from hf_diloco.apps.common.base import PushBlock
from hf_diloco.errors import ConfigError


def check_login() -> None:
    """Raises `ConfigError` if this machine has no token of the Hub, which shows here and not after the training."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError("push_to_hub: this machine has no token of the Hub: run `hf auth login`, or set HF_TOKEN")


def publish(folder: Path, where: PushBlock) -> None:
    """Uploads a model's folder, card included, as one commit. If that fails it only says so: the model is on the disk.

    Args:
        folder: as `save_final_model` and `write_card` have left it.
        where: the repository, which is made if it is not there.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo = api.create_repo(where.repo, private=where.private, exist_ok=True)
        api.upload_folder(
            repo_id=repo.repo_id, folder_path=folder, revision=where.revision, commit_message="End of training"
        )
    except Exception as error:  # those of the client's HTTP library come through, and it is not always the same one
        reason = " ".join(str(error).split()) or type(error).__name__
        print(
            f"warning: the model is not on the Hub ({reason}): push it with `{_command(folder, where)}`",
            file=sys.stderr,
            flush=True,
        )
        return
    print(f"published: {repo}", flush=True)


def _command(folder: Path, where: PushBlock) -> str:
    """What does the same by hand; it makes the branch, too."""
    private = ["--private"] if where.private else []
    revision = ["--revision", where.revision] if where.revision else []
    return shlex.join(["hf", "upload", where.repo, str(folder), *private, *revision])
