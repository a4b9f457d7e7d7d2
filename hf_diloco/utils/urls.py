"""Addresses: hosts on which islands and nodes may listen, and the URL of the rendezvous.

Parses text only, and imports nothing slow. Object stores:

file:///DIR            a folder, such as a network file system that all islands mount
s3://BUCKET/PREFIX     Amazon S3 and stores that speak its protocol (AWS_ENDPOINT_URL)
gs://BUCKET/PREFIX     Google Cloud Storage
az://CONTAINER/PREFIX  Azure Blob Storage (AZURE_STORAGE_ACCOUNT_NAME)
http://HOST:PORT/NAME  a server of `hf-diloco rendezvous`; https:// behind a proxy that speaks TLS
memory://NAME          this process alone; for tests
"""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hf_diloco.errors import ConfigError

STORE_SCHEMES = ("file", "s3", "gs", "az", "http", "https", "memory")
VALID_URLS = "file:///DIR, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or http://HOST:PORT/NAME"
"""The forms that messages list. Only tests use memory://NAME."""

_SEGMENT = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._=+-]+"
OBJECT_PATH = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
"""Paths of objects: relative, without . and .., of characters that are special in no store."""
MAX_PATH = 512
MAX_SERVED_PATH = 2 * MAX_PATH + 1
"""On a server, and so in its folder: the name of a run, and a path in it."""
is_object_path = re.compile(rf"(?=.{{1,{MAX_PATH}}}\Z){OBJECT_PATH.pattern}").fullmatch
"""Whether an object may have this path: a match, or None."""

_CLOUD_URL = re.compile(rf"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]*)(?:/({OBJECT_PATH.pattern}))?/?")
_SERVER_URL = re.compile(
    rf"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{{1,5}}))?/({OBJECT_PATH.pattern})/?"
)
_MEMORY_URL = re.compile(rf"memory://{OBJECT_PATH.pattern}/?")


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_address(host: str) -> Address | None:
    """Parses a numeric address, in any form that the system takes (0, 127.1, ::ffff:10.0.0.1); None for a name."""
    try:
        address: Address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def check_specific(host: str) -> str:
    """Returns `host`; raises `ConfigError` if it stands for all interfaces: nobody can connect to that."""
    address = parse_address(host)
    if address is not None and address.is_unspecified:
        raise ConfigError(
            f"{host} stands for every interface of the machine, public ones included, and leads nowhere from another "
            "machine: give the one address that the others reach, in a private network or a VPN; on one machine "
            "127.0.0.1"
        )
    return host


def host_and_port(host: str, port: int) -> str:
    """Formats host and port as in URLs: an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_public(numeric: str) -> bool:
    """Whether an address is public."""
    address = parse_address(numeric)
    return address is not None and address.is_global


def is_loopback(numeric: str) -> bool:
    """Whether an address reaches this machine only."""
    address = parse_address(numeric)
    return address is not None and address.is_loopback


def is_object_store(url: str) -> bool:
    """Whether a rendezvous has the scheme of an object store; `check_store_url` checks the rest."""
    return url.partition(":")[0] in STORE_SCHEMES


def check_between_processes(url: str) -> None:
    """Raises `ConfigError` for memory://NAME, which other processes cannot see."""
    if url.startswith("memory:"):
        raise ConfigError(
            f"rendezvous {url!r}: islands are processes, and share no memory: use file:///DIR, or another object store"
        )


def check_store_url(url: str) -> str:
    """Returns the URL without a trailing slash; raises `ConfigError` if it has no form of this module's docstring."""
    if url.startswith("file:"):
        path = unquote(url.removeprefix("file://"))
        if not url.startswith("file:///") or not path.strip("/") or re.search(r"[\0?#]", path):
            raise ConfigError(
                f"rendezvous {url!r}: a folder needs its full path, beginning with three slashes, as in "
                "file:///shared/runs/my-run; it must be the same folder on all islands"
            )
        return url.rstrip("/")
    if _CLOUD_URL.fullmatch(url) or _MEMORY_URL.fullmatch(url) or split_server_url(url):
        return url.rstrip("/")
    raise ConfigError(f"rendezvous {url!r} is no object store: expected {VALID_URLS}")


def check_is_folder(url: str) -> None:
    """Raises `ConfigError` if a file has the place of a store's folder, which need not exist yet."""
    path = Path(unquote(url.removeprefix("file://")))
    with suppress(OSError):  # such as for want of permission: who opens the store reports it
        if path.exists() and not path.is_dir():
            raise ConfigError(f"rendezvous {url!r}: {path} is a file: name a folder")


def split_server_url(url: str) -> tuple[str, str, int, str] | None:
    """Splits the URL of a server of `hf-diloco rendezvous` into scheme, host, port and path; None for other URLs."""
    match = _SERVER_URL.fullmatch(url)
    if match is None:
        return None
    port = int(match[3] or (443 if match[1] == "https" else 80))
    return (match[1], match[2].strip("[]"), port, match[4]) if 0 < port < 1 << 16 else None


def _may_be_host(name: str) -> bool:
    """Whether the system can resolve a name: for some, such as a..b, it raises an unusual error."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def split_tcp_url(url: str) -> tuple[str, int]:
    """Splits `tcp://HOST:PORT` into host and port; raises `ConfigError` if invalid, or HOST is every interface."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # an unclosed bracket, or an invalid port
        parts, port = None, None
    if parts and parts.scheme != "tcp":
        raise ConfigError(
            f"rendezvous {url!r}: the scheme must be tcp, as in tcp://10.0.0.1:29400, or an object store's: "
            f"{', '.join(scheme for scheme in STORE_SCHEMES if scheme != 'memory')}"
        )
    if parts and (re.search(r"\s", parts.netloc) or not _may_be_host(parts.hostname or "")):
        parts = None
    if not parts or not parts.hostname or not port or parts.path.strip("/") or parts.query or parts.username:
        raise ConfigError(f"rendezvous {url!r}: expected tcp://HOST:PORT with a port from 1 to 65535")
    return check_specific(parts.hostname), port
