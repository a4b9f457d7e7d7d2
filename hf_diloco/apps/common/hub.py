"""The Hugging Face Hub: checks reachability and login, and publishes trained models."""

from __future__ import annotations

import os
import shlex
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from hf_diloco.apps.common.environment import is_leader
from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import one_line
from hf_diloco.utils.threads import call_within

if TYPE_CHECKING:
    from hf_diloco.apps.common.base import PushBlock

SECONDS = 5.0
_OFFLINE = "HF_HUB_OFFLINE"


def use_cache_without_hub(is_needed: bool) -> None:
    """Switches the libraries to their cache if the Hub does not answer. Call it before they are imported.

    Tries once, for 5 seconds, and only if the run needs the Hub. The libraries themselves would try for half a minute
    per file.
    """
    if not is_needed or os.environ.get(_OFFLINE):
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        problem = call_within(SECONDS, lambda: _try(endpoint))  # a DNS lookup has no timeout of its own
    except TimeoutError as error:
        problem = str(error)
    if not problem:
        return
    os.environ[_OFFLINE] = "1"
    if is_leader():
        print(
            f"note: the Hugging Face Hub ({endpoint}) cannot be reached ({problem}): only what was downloaded before "
            f"is used ({_OFFLINE}=1)",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def loading(setting: str, path: str, remedy: str = "") -> Iterator[None]:
    """Turns a library's errors on loading what a setting names, on the Hub or a local path, into `ConfigError`.

    The message has the library's reason, a remedy if the Hub is offline, and at its end `remedy`.
    """
    try:
        yield
    except Exception as error:  # of the Hub, the file system or the file's format
        model = Path(path) / "model"
        if (model / "config.json").is_file():
            raise ConfigError(f"{setting}: {path} is the folder of a run: name its model, {model}") from error
        said = f"{setting}: cannot load {path!r}: {type(error).__name__}: {one_line(error)}"
        if os.environ.get(_OFFLINE) and not Path(path).exists():
            said += (
                f" (the Hub is not asked: {_OFFLINE}=1): correct the name, give a folder of this machine, or run `hf "
                f"download {path}` where the Hub can be reached"
            )
        raise ConfigError(f"{said}{remedy}") from error


def _try(url: str) -> str:
    """Returns why no server answers at `url`; "" if one does, with any status."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return "" if isinstance(reason, ssl.SSLError) else str(reason)  # the libraries use their own certificates
    return ""


def check_login() -> None:
    """Raises `ConfigError` if this machine has no token that the Hub accepts, before training instead of after it.

    Ignores a Hub that does not answer: it may answer after training.
    """
    from huggingface_hub import get_token, whoami
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise ConfigError("push_to_hub: this machine has no token of the Hub: run `hf auth login`, or set HF_TOKEN")
    try:
        call_within(SECONDS, whoami)
    except HfHubHTTPError as error:
        if error.response.status_code == HTTPStatus.UNAUTHORIZED:
            raise ConfigError(
                "push_to_hub: the Hub does not take this machine's token: run `hf auth login`, or set HF_TOKEN"
            ) from error
    except Exception:  # of the HTTP library, too: whether the Hub can be reached now says nothing of the run's end
        pass


def publish(folder: Path, where: PushBlock) -> None:
    """Uploads a model's folder with its card as one commit; creates the repository if missing.

    Only prints a warning on failure, as the model is on disk.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo = api.create_repo(where.repo, private=where.private, exist_ok=True)
        api.upload_folder(
            repo_id=repo.repo_id, folder_path=folder, revision=where.revision, commit_message="End of training"
        )
    except Exception as error:  # includes those of the client's HTTP library, which varies
        reason = one_line(error)
        options = ["--private"] * where.private + (["--revision", where.revision] if where.revision else [])
        by_hand = shlex.join(["hf", "upload", where.repo, str(folder), *options])  # it makes the branch, too
        print(
            f"warning: the model is not on the Hub ({reason}): push it with `{by_hand}`", file=sys.stderr, flush=True
        )
        return
    print(f"published: {repo}", flush=True)
