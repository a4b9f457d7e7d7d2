"""What an object store's refusals and silences mean: whether to ask again, and what a person can do about it."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from hf_diloco.errors import StoreError
from hf_diloco.store.backends import ENVIRONMENT_PREFIX, lacks_bucket
from hf_diloco.utils.urls import MAX_PATH, is_object_path

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_DENIAL = re.compile(
    r"status code: 40[13]|AccessDenied|ExpiredToken|[Cc]redential|SecretAccessKey|169\.254\.169\.254|metadata\.google"
)
_PASSING = (errno.ESTALE, errno.EINTR, errno.EAGAIN)  # a network file system's
_LASTING = frozenset(range(400, 500)) - {408, 409, 425, 429}  # answers that asking again does not change


class CutShortError(StoreError):
    """An object that should be there is absent, or shorter than it should be."""


class TooLargeError(StoreError):
    """An object is larger than what it is to be read as."""


class UnreadableError(StoreError):
    """What lies where an object should be is a symbolic link, a folder or a device: nobody reads it."""


@dataclass(frozen=True)
class Failures:
    """Reads the errors of one store.

    Attributes:
        scheme: of its URL.
        timeout: seconds after which it counts as lost.
        read_only: nothing is to be written there.
        is_kept_by_peer: an island or a node keeps it, for as long as it takes part.
    """

    scheme: str
    timeout: float
    read_only: bool
    is_kept_by_peer: bool = False

    def may_pass(self, error: Exception) -> bool:
        """Whether asking again may help."""
        if self.scheme == "file" and isinstance(error, OSError) and error.errno in _PASSING:
            return True
        if self.scheme in ("file", "memory") or isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return False
        if "builder error" in str(error):  # http where only https is allowed
            return False
        status = re.search(r"status code: (\d{3})", str(error))
        return not (status and int(status[1]) in _LASTING)

    def remedy(self, error: Exception | None = None) -> str:
        """What a person can do; without an error, where the store could not even be opened."""
        text = str(error)
        if self.scheme in ("file", "memory") and self.read_only:
            return "give the rendezvous of a run, on a machine that can read it"
        if self.scheme in ("file", "memory"):
            return "the folder must be writable and have space; correct it, or choose another rendezvous"
        if error is not None and lacks_bucket(error):
            return "make the bucket, or correct rendezvous"
        if self.is_kept_by_peer:
            return "who keeps it has ended, or cannot be reached"
        if self.scheme in ("http", "https") and (error is None or self.may_pass(error)):
            return "is `hf-diloco rendezvous` running there, and does its firewall let this machine in?"
        if "builder error" in text:
            return f"set {ENVIRONMENT_PREFIX[self.scheme]}_ALLOW_HTTP=true for an endpoint without TLS, or use https"
        if error is None or _is_denied(error):
            return (
                "give this machine credentials that may list, read, write and delete there; they come from the "
                f"environment: {_CREDENTIALS[self.scheme]}, or from the machine's own identity"
            )
        if not self.may_pass(error):
            return "it refuses what the islands need: it must offer conditional writes, range reads and lists"
        return f"no success within {self.timeout:g} s; check the network, the endpoint and the store's state"


def is_full(error: Exception) -> bool:
    """Whether there is no space left, or a quota is used up."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return re.search(r"status code: 507|QuotaExceeded|InsufficientStorage|XMinioStorageFull", str(error)) is not None


def reason_of(error: Exception) -> str:
    """The store's own words in one line, without the request's address, which may hold a signature."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    code, message = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code:
        return f"{code[1]}: {message[1]}" if message else code[1]
    status = re.search(r"status code: (\d{3}[A-Za-z ]*)", text)
    if status:
        return status[1].strip()
    if named := re.findall(r'message: "([^"\n]+)"', text):  # the operating system's
        return str(named[-1])
    if "TimedOut" in text or "timed out" in text:
        return "no answer in time"
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return first.rpartition(" - ")[2][:300]


def _is_denied(error: Exception) -> bool:
    denials = PermissionDeniedError | UnauthenticatedError | PermissionError
    return isinstance(error, denials) or _DENIAL.search(str(error)) is not None


def check_path(path: str) -> None:
    """Raises `StoreError` for what no object may be called."""
    if not is_object_path(path):  # which may have come from another island's record
        raise StoreError(
            f"{path[:MAX_PATH]!r} is no path in an object store: it must be relative, of segments of letters, digits "
            "and ._=+- between single slashes"
        )
