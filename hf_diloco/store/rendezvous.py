"""Where islands meet and listen: addresses, ports, and the store that island 0 or node 0 serves at tcp://HOST:PORT."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hf_diloco.errors import ConfigError, RendezvousError, StopRequested, StoreError
from hf_diloco.utils.listening import raise_file_limit
from hf_diloco.utils.urls import check_specific, host_and_port, is_loopback, is_public, split_tcp_url
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

GONE_SECONDS = 1.0
"""Seconds without a listener at the port before the process that serves the store counts as gone."""
_RETRY_SECONDS = 0.2
_START_SECONDS = 1.0  # for a thread to start
_ELSEWHERE = "192.0.2.1"  # an address that no machine has, RFC 5737


class Place(Protocol):
    """The settings that say where to meet; see `DiLoCoConfig`."""

    @property
    def rendezvous(self) -> str | None: ...

    @property
    def bind_address(self) -> str | None: ...

    @property
    def allow_public_address(self) -> bool: ...

    @property
    def join_timeout(self) -> float: ...


def check_own_address(address: str | None) -> None:
    """Raises `ConfigError` if this machine does not have the address `bind_address`; accepts None and ""."""
    try:
        for family, kind, _, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM) if address else ():
            with socket.socket(family, kind) as listener:
                listener.bind(place)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"bind_address: {address!r} is no address of this machine ({error}): give one of those that `ip addr` "
            "shows, or leave it out"
        ) from None


def find_address(config: Place) -> str:
    """Returns the address where this rank listens for islands it met elsewhere: `bind_address`, or the default
    route's. Raises `RendezvousError` if it is public."""
    raise_file_limit()
    address = config.bind_address
    if address is None:
        try:
            address = local_address(_ELSEWHERE, 1)
        except OSError:  # this machine has no network route
            address = "127.0.0.1"
    refuse_public(address, 1, config)
    return address


def warn_if_exposed(address: str) -> None:
    """Warns about unauthenticated traffic at an address that other machines can reach."""
    try:
        _, numeric = _resolve(address, 1)
    except socket.gaierror:
        return
    if not is_loopback(numeric):
        logger.warning(
            "what goes over %s is neither encrypted nor authenticated: who reaches its ports can read the weights, "
            "change them, or end the run. Give all one key (key_file or HF_DILOCO_KEY), and keep strangers out by a "
            "firewall or a VPN (docs/security.md has a recipe)",
            address,
        )


def refuse_public(address: str, port: int, config: Place, unit: str = "island") -> None:
    """Raises `RendezvousError` for a public address unless `allow_public_address` is set."""
    try:
        _, numeric = _resolve(address, port)
    except socket.gaierror:
        return  # the caller reports it when it connects
    try:
        check_specific(numeric)
    except ValueError as error:
        raise RendezvousError(f"{address}: {error}") from None
    if not config.allow_public_address and is_public(numeric):
        elsewhere = ", or meet in an object store" if unit == "island" else ""
        raise RendezvousError(
            f"{address} ({numeric}) is a public address, and traffic between machines is neither encrypted nor "
            "authenticated without a key; with one, strangers who reach a port can still end a process: join the "
            f"machines by a VPN and use its addresses (docs/security.md has a recipe){elsewhere}. "
            "Where a firewall lets nobody else in, set allow_public_address: true"
        )


def listen(host: str, port: int, config: Place, unit: str) -> socket.socket:
    """Opens the port only on HOST's own address, not on every interface of the machine."""
    address = config.bind_address or host
    try:
        family, numeric = _resolve(address, port)
        return socket.create_server((numeric, port), family=family, backlog=2048)
    except OSError as error:
        problems = {
            errno.EADDRINUSE: f"port {port} on {address} is in use: another program has it, or {unit} 0 of this run "
            f"is running already. End that, or choose another port for all {unit}s (rendezvous)",
            errno.EADDRNOTAVAIL: f"{address} is not an address of this machine, but {unit} 0 keeps the rendezvous: "
            f"start {unit} 0 on that machine, or, behind NAT, set bind_address to this machine's own address",
        }
        other = f"cannot open the rendezvous at {address}:{port}: {error}. Check the rendezvous setting of {unit} 0"
        raise RendezvousError(problems.get(error.errno or 0, other)) from None


def local_address(host: str, port: int) -> str:
    """Returns the address of the local interface that routes to the rendezvous."""
    family, numeric = _resolve(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((numeric, port))  # sends nothing: it only picks the route
        return str(probe.getsockname()[0])


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Resolves a host to a numeric address, IPv4 if it has one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])


def url_of(rendezvous: str) -> str:
    """Returns the object store URL of the store that island 0 serves at tcp://HOST:PORT."""
    return f"http://{host_and_port(*split_tcp_url(rendezvous))}/run"


def address_towards(config: Place) -> str:
    """Returns `bind_address`, or the local address that reaches island 0; this rank listens there for others."""
    assert config.rendezvous is not None
    return config.bind_address or local_address(*split_tcp_url(config.rendezvous))


def find_store(config: Place, notes: WaitNotes, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Retries until island 0, or node 0, accepts a connection, also while the name service is temporarily unavailable.

    Raises `RendezvousError` if nobody answers within `join_timeout`, or traffic would cross a public network, and
    `StopRequested` if `should_stop` returns true while nobody answers.
    """
    host, port = _checked(config, notes.unit)
    deadline = time.monotonic() + config.join_timeout
    wait = notes.begin(config.join_timeout, where=config.rendezvous)
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            is_over = time.monotonic() >= deadline
            if isinstance(error, socket.gaierror) and (is_over or error.errno != socket.EAI_AGAIN):
                raise RendezvousError(
                    f"rendezvous host {host!r} has no address ({error.strerror}): correct it"
                ) from None
            if is_over:
                raise RendezvousError(
                    f"nobody answers at {config.rendezvous} after {config.join_timeout:g} s (join_timeout): "
                    f"{error.strerror or error}. Is {notes.unit} 0 running there, and does its firewall let this "
                    "machine in?"
                ) from None
            if should_stop():
                raise StopRequested from None
            wait.look([0], str(error.strerror or error))
        time.sleep(_RETRY_SECONDS)


def await_training(
    config: Place, has_begun: Callable[[], bool], notes: WaitNotes, should_stop: Callable[[], bool] = lambda: False
) -> None:
    """Waits until island 0, or node 0, has begun another training at the rendezvous: it first ends the last store.

    Args:
        has_begun: looks into the store that is there.

    Raises:
        RendezvousError: nobody answers within `join_timeout`, or another training has not begun by then.
        StopRequested: `should_stop` returned true.
    """
    deadline = time.monotonic() + config.join_timeout
    wait = notes.begin(config.join_timeout, where=config.rendezvous)
    while True:
        find_store(config, notes, should_stop)
        with suppress(RendezvousError, StoreError):  # the old store is shutting down
            if has_begun():
                return
        if should_stop():
            raise StopRequested
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"{notes.unit} 0 has not begun another training at {config.rendezvous} within "
                f"{config.join_timeout:g} s (join_timeout): make all {notes.unit}s train the same number of times"
            )
        wait.look([0])
        time.sleep(_RETRY_SECONDS)


class StoreHost:
    """Serves a folder to the other islands until it is closed; a host that restarts with it resumes from its objects.
    Without a folder they are in memory, and lost when this host ends.

    Raises `RendezvousError` if the port is in use, HOST is not this machine, the folder cannot be written or is served
    by another process, traffic would cross a public network, or too few file descriptors are left.
    """

    def __init__(self, config: Place, folder: Path | None = None, unit: str = "island") -> None:
        from hf_diloco.store.server import StoreServer
        from hf_diloco.store.serving import Serving

        host, port = _checked(config, unit)
        raise_file_limit()
        listener = listen(host, port, config, unit)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            app = StoreServer(folder).app()
        except RendezvousError:
            listener.close()
            raise
        except OSError as error:
            listener.close()
            raise RendezvousError(
                f"island 0 keeps what islands leave for each other in {folder}, which cannot be written "
                f"({error.strerror or error}): choose another output_dir, with space for a few copies of the model"
            ) from None
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None
        self._is_up, self._over = threading.Event(), asyncio.Event()
        self._serving = Serving(app, listener)
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="hf-diloco-store", daemon=True)
        try:
            self._thread.start()
            self._is_up.wait()
        except BaseException:  # such as Ctrl-C during start: a running thread would keep the port
            deadline = time.monotonic() + _START_SECONDS
            while not self._thread.is_alive() and time.monotonic() < deadline:
                time.sleep(0.001)
            self.close()
            raise
        if self._failure:
            self._thread.join()
            raise RendezvousError(
                f"cannot serve the rendezvous at {config.rendezvous}: {self._failure}. Raise the limit of open files "
                f"(ulimit -n) of {unit} 0, if these are too many"
            ) from self._failure
        if folder:
            logger.info("islands meet here, at %s; what they leave for each other is in %s", config.rendezvous, folder)

    def _serve(self, listener: socket.socket) -> None:
        try:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._answer())
        except Exception as error:
            if self._is_up.is_set():
                raise
            self._failure = error
        finally:
            listener.close()
            if self._loop:
                self._loop.close()
            self._is_up.set()

    async def _answer(self) -> None:
        try:
            await self._serving.begin()
            self._is_up.set()
            await self._over.wait()
        finally:
            await self._serving.end()

    def close(self) -> None:
        """Stops serving; returns when the port is free."""
        if os.getpid() != self._process:  # a forked process does not have the thread
            return
        if self._thread.is_alive():
            self._is_up.wait()
            if self._loop:
                with suppress(RuntimeError):  # it has just ended
                    self._loop.call_soon_threadsafe(self._over.set)
            if threading.current_thread() is not self._thread:  # the garbage collector may call this on that thread
                self._thread.join()


def _checked(config: Place, unit: str) -> tuple[str, int]:
    assert config.rendezvous is not None
    host, port = split_tcp_url(config.rendezvous)
    for address in filter(None, (host, config.bind_address)):
        refuse_public(address, port, config, unit)
    return host, port
