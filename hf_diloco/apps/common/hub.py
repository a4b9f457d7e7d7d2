"""Whether the Hugging Face Hub can be reached: one short try, where its libraries take half a minute for each file."""

from __future__ import annotations

import os
import ssl
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

from hf_diloco.apps.common.environment import is_leader

SECONDS = 5.0
_OFFLINE = "HF_HUB_OFFLINE"


def use_cache_without_hub(is_needed: bool) -> None:
    """Has the libraries take what is in their cache if the Hub does not answer. Call it before they are imported.

    Args:
        is_needed: whether the run names anything of the Hub; else nothing is tried.
    """
    if not is_needed or os.environ.get(_OFFLINE):
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    problem = _try(endpoint)
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


def why_not_loaded(path: str, error: Exception) -> str:
    """What a library said that was to load something, on one line, and what to do if the Hub was not asked.

    Args:
        path: of the Hub or of this machine.
        error: the library's.
    """
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not os.environ.get(_OFFLINE) or Path(path).exists():
        return said
    return (
        f"{said} (the Hub is not asked: {_OFFLINE}=1): correct the name, give a folder of this machine, or run "
        f"`hf download {path}` where the Hub can be reached"
    )


def _try(url: str) -> str:
    """Why no server answers at `url`; empty if one does, whatever it says."""
    found = [f"no answer in {SECONDS:g} s"]
    # In a thread: looking up a name has no time limit of its own.
    asking = threading.Thread(target=lambda: found.append(_ask(url)), daemon=True)
    asking.start()
    asking.join(SECONDS)
    return found[-1]


def _ask(url: str) -> str:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return "" if isinstance(reason, ssl.SSLError) else str(reason)  # the libraries have certificates of their own
    return ""
