"""The text of an object store's address. Looks at nothing but the text, and imports nothing that takes time.

file:///DIR            a folder, such as a network file system that all islands mount
s3://BUCKET/PREFIX     Amazon S3 and what speaks its protocol (AWS_ENDPOINT_URL)
gs://BUCKET/PREFIX     Google Cloud Storage
az://CONTAINER/PREFIX  Azure Blob Storage (AZURE_STORAGE_ACCOUNT_NAME)
memory://NAME          this process alone; for tests
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from hf_diloco.errors import RendezvousError

STORE_SCHEMES = ("file", "s3", "gs", "az", "memory")
VALID_URLS = "file:///DIR, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or memory://NAME"
_SEGMENT = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._=+-]+"
OBJECT_PATH = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
"""Paths of objects: relative, without . and .., of characters that mean nothing to any store."""

_CLOUD_URL = re.compile(rf"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]*)(?:/({OBJECT_PATH.pattern}))?/?")
_MEMORY_URL = re.compile(r"memory://[A-Za-z0-9._-]+/?")


def is_object_store(url: str) -> bool:
    """Whether a rendezvous is meant to be an object store; `check_store_url` says whether it can be one."""
    return url.partition(":")[0] in STORE_SCHEMES


def check_store_url(url: str) -> str:
    """Returns the URL without a slash at its end.

    Raises:
        RendezvousError: it has none of the forms that this module's text lists.
    """
    if url.startswith("file:"):
        path = unquote(url.removeprefix("file://"))
        if not url.startswith("file:///") or not path.strip("/") or re.search(r"[\0?#]", path):
            raise RendezvousError(
                f"rendezvous {url!r}: a folder needs its full path, beginning with three slashes, as in "
                "file:///shared/runs/my-run; it must be the same folder on all islands"
            )
        return url.rstrip("/")
    if _CLOUD_URL.fullmatch(url) or _MEMORY_URL.fullmatch(url):
        return url.rstrip("/")
    raise RendezvousError(f"rendezvous {url!r} is no object store: expected {VALID_URLS}")


__all__ = ["OBJECT_PATH", "STORE_SCHEMES", "VALID_URLS", "check_store_url", "is_object_store"]
