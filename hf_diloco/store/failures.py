"""Interprets the errors and timeouts of an object store, and says what users can do about them."""

from __future__ import annotations

import errno
import re

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from hf_diloco.errors import StoreError, StoreFullError
from hf_diloco.store.backends import ENVIRONMENT_PREFIX, lacks_bucket
from hf_diloco.store.folder import NoFileError

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_DENIAL = re.compile(
    r"status code: 40[13]|AccessDenied|ExpiredToken|[Cc]redential|SecretAccessKey|169\.254\.169\.254|metadata\.google"
)
_PASSING = (errno.ESTALE, errno.EINTR, errno.EAGAIN)  # transient errors of a network file system
KEEPER_GONE = "the process that hosts it has ended, or cannot be reached"  # of a store that an island or a node hosts
_LASTING = frozenset(range(400, 500)) - {408, 409, 425, 429} | {501}  # status codes that a retry does not change
_INTERRUPTED = re.compile(r"<Code>(?:RequestTimeout|IncompleteBody|BadDigest|XAmzContentSHA256Mismatch)<")
"""S3's codes, with status 400, for a request that stalled or was damaged on its way."""
_CAUSES = (
    (
        r"RequestTimeTooSkewed|RequestExpired|reasonable timeframe",
        "set this machine's clock (`timedatectl`): the store rejects requests with another time than its own",
    ),
    (
        r"AuthorizationHeaderMalformed|PermanentRedirect|incorrectly configured region",
        "set AWS_REGION to the bucket's region, and AWS_ENDPOINT_URL to its endpoint unless it is Amazon's",
    ),
    (
        r"status code: 407|[Pp]roxy authentication required",
        "the proxy that the environment names (HTTPS_PROXY) wants a password; or name the store in NO_PROXY",
    ),
)
"""Further failures that a retry does not change, as patterns of the store's error text, with the remedy."""


class TruncatedError(StoreError):
    """An object that should be there is absent, or shorter than it should be."""


class TooLargeError(StoreError):
    """An object is larger than its reader's limit."""


class UnreadableError(StoreError):
    """A symbolic link, a folder or a device lies where an object should be, and is not read."""


class AbsentError(Exception):
    """There is no such object."""


class NotYetVisibleError(Exception):
    """The store says that the object exists, but does not show it yet."""


class Failures:
    """Interprets failures of one store; see `ObjectStore`. `is_hosted`: an island or a node hosts it."""

    def __init__(self, url: str, timeout: float, read_only: bool, is_hosted: bool) -> None:
        self._url, self._timeout = url, timeout
        self._scheme = url.partition(":")[0]
        self._read_only, self._is_hosted = read_only, is_hosted

    def is_transient(self, error: Exception) -> bool:
        """Whether a retry may help."""
        if isinstance(error, NotYetVisibleError):
            return True
        if isinstance(error, NoFileError):
            return False
        if self._scheme == "file" and isinstance(error, OSError) and error.errno in _PASSING:
            return True
        if self._scheme in ("file", "memory") or isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return False
        if "builder error" in str(error) or _remedy_of(error):  # "builder error": http where only https is allowed
            return False
        status = re.search(r"status code: (\d{3})", str(error))
        return not (status and int(status[1]) in _LASTING) or _INTERRUPTED.search(str(error)) is not None

    def error_for(self, verb: str, path: str, error: Exception) -> StoreError:
        """Returns the error to raise for an operation on an object that failed."""
        if isinstance(error, NoFileError):
            return UnreadableError(f"{self._url}: {error.filename} {error.strerror}: remove it")
        is_unsettled = isinstance(error, NotYetVisibleError)
        reason = "it says that the object exists, but does not show it" if is_unsettled else reason_of(error)
        kind = StoreFullError if is_full(error) else StoreError
        return kind(f"{self._url} does not {verb} {path or 'its objects'} ({reason}): {self.remedy(error)}")

    def remedy(self, error: Exception | None = None) -> str:
        """Returns what the user can do; without an error, if the store could not even be opened."""
        if self._scheme in ("file", "memory") and self._read_only:
            return "give the rendezvous of a run, on a machine that can read it"
        if isinstance(error, PermissionError) and self._scheme == "file":
            return (
                "this user must be able to read and write what islands write there as other users: give them one "
                "group, `chmod g+ws` the folder for it, and start all with umask 002"
            )
        if self._scheme in ("file", "memory"):
            return "the folder must be writable and have space; correct it, or choose another rendezvous"
        if error is not None and lacks_bucket(error):
            return "make the bucket, or correct rendezvous"
        if self._is_hosted:
            return KEEPER_GONE
        if self._scheme in ("http", "https") and (error is None or self.is_transient(error)):
            return "is `hf-diloco rendezvous` running there, and does its firewall let this machine in?"
        if remedy := _remedy_of(error):
            return remedy
        if "builder error" in str(error):
            return f"set {ENVIRONMENT_PREFIX[self._scheme]}_ALLOW_HTTP=true for an endpoint without TLS, or use https"
        if error is None or _is_denied(error):
            return (
                "give this machine credentials that may list, read, write and delete there; they come from the "
                f"environment: {_CREDENTIALS[self._scheme]}, or from the machine's own identity"
            )
        if not self.is_transient(error):
            return "it refuses what the islands need: it must offer conditional writes, range reads and lists"
        return f"no success within {self._timeout:g} s; check the network, the endpoint and the store's state"


def _remedy_of(error: Exception | None) -> str:
    """Returns the remedy for one of `_CAUSES`; "" for other errors."""
    return next((remedy for words, remedy in _CAUSES if re.search(words, str(error))), "")


def is_full(error: Exception) -> bool:
    """Whether there is no space left, or a quota is used up."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return re.search(r"status code: 507|QuotaExceeded|InsufficientStorage|XMinioStorageFull", str(error)) is not None


def reason_of(error: Exception) -> str:
    """Returns the store's own error text in one line, without the request's address, which may hold a signature."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    code, message = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code:
        return f"{code[1]}: {message[1]}" if message else code[1]
    status = re.search(r"status code: (\d{3}[A-Za-z ]*)", text)
    if status:
        return status[1].strip()
    if named := re.findall(r'message: "([^"\n]+)"', text):  # the operating system's message
        return str(named[-1])
    if "TimedOut" in text or "timed out" in text:
        return "no answer in time"
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return first.rpartition(" - ")[2][:300]


def _is_denied(error: Exception) -> bool:
    denials = PermissionDeniedError | UnauthenticatedError | PermissionError
    return isinstance(error, denials) or _DENIAL.search(str(error)) is not None
