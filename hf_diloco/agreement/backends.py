"""The object_store client behind each kind of address: time limits, retries, what the environment says."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from obstore.store import LocalStore, MemoryStore, from_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore as Backend, RetryConfig

ENVIRONMENT_PREFIX = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_LONGEST_REQUEST = timedelta(hours=1)

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_backend(url: str, timeout: float, read_only: bool) -> Backend:
    """A client for a checked URL; see `ObjectStore` for the rest."""
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        with _memory_lock:
            return _memory.setdefault(rest, MemoryStore())
    if scheme == "file":
        folder = Path(unquote(rest))
        if read_only:
            return _open_to_look(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to read and write in {folder}")
        return LocalStore(folder)
    half = timedelta(seconds=timeout / 2)
    client: ClientConfig = {
        "connect_timeout": min(half, timedelta(seconds=5)),
        "read_timeout": half,
        "timeout": _LONGEST_REQUEST,
        **client_options(ENVIRONMENT_PREFIX[scheme], os.environ),  # type: ignore[typeddict-item]
    }
    retry: RetryConfig = {
        "max_retries": 1000,  # the time limit is what counts
        "retry_timeout": half,
        "backoff": {
            "init_backoff": timedelta(seconds=min(0.1, timeout / 50)),
            "max_backoff": timedelta(seconds=min(2.0, timeout / 20)),
            "base": 2,
        },
    }
    return from_url(url, client_options=client, retry_config=retry)


def _open_to_look(folder: Path) -> Backend:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise PermissionError(f"no permission to read in {folder}")
    return LocalStore(folder)


def client_options(prefix: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the client would read from the environment by itself, if it were not given options."""
    options: dict[str, Any] = {}
    for name in ("allow_http", "allow_invalid_certificates"):
        value = environment.get(f"{prefix}_{name.upper()}", "").strip().lower()
        if value:
            options[name] = value in ("1", "true", "on", "yes", "y")
    if proxy := environment.get(f"{prefix}_PROXY_URL"):
        options["proxy_url"] = proxy
    return options
