"""An S3 server for tests, in a process of its own, and a proxy that spoils some of what passes.

    with S3Server() as server:
        with FaultyProxy(server, share_of(0.2, 500, Fault.LOSE_ANSWER)) as proxy:
            run([sys.executable, "train_lm.py", run_file], env=proxy.environment())

The server is moto's: the real protocol, contents in memory, signatures not checked.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.processes import Process, Processes, find_free_port

BUCKET = "test-bucket"
START_SECONDS = 60.0
_PIECE_BYTES = 16 << 10


def _environment(port: int, address: str = "127.0.0.1") -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://{address}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }


class S3Server:
    """A server with one empty bucket.

    Args:
        bucket: its name.
        address: where islands find it; it listens on all addresses of this machine if that is not the usual one.

    Attributes:
        url: `s3://` and the bucket; add `/PREFIX` for a place of one's own.
    """

    def __init__(self, bucket: str = BUCKET, address: str = "127.0.0.1") -> None:
        self.bucket = bucket
        self.address = address
        self.url = f"s3://{bucket}"
        self.port = find_free_port()
        self._processes = Processes()
        self._process: Process | None = None

    def environment(self) -> dict[str, str]:
        """Variables with which a process finds the server and may use it."""
        return _environment(self.port, self.address)

    def start(self, with_bucket: bool = True) -> Self:
        """Starts the server, and makes the bucket."""
        assert self._process is None
        self._process = self._processes.spawn([sys.executable, "-m", "tests.s3", str(self.port), *self._listen()])
        self._process.wait_for("up", START_SECONDS)
        if with_bucket:
            status, answer = request(self.port, "PUT", f"/{self.bucket}")
            assert status == 200, answer
        return self

    def _listen(self) -> list[str]:
        return [] if self.address == "127.0.0.1" else ["0.0.0.0"]

    def stop(self) -> None:
        """Ends the server; its contents are lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(expect=None)
            self._process = None

    def restart(self, with_bucket: bool = True) -> None:
        """Kills the server and starts it again at the same port, with an empty bucket or none."""
        self.stop()
        self.start(with_bucket)

    def pause(self) -> None:
        """Closes the port: connections are refused. The contents stay."""
        self._signal(signal.SIGUSR1, "down")

    def resume(self) -> None:
        """Opens the port again, after `pause`."""
        self._signal(signal.SIGUSR2, "up")

    def _signal(self, number: signal.Signals, answer: str) -> None:
        assert self._process is not None
        seen = len(self._process.output.splitlines())
        self._process.popen.send_signal(number)
        deadline = time.monotonic() + 60
        while answer not in self._process.output.splitlines()[seen:]:
            assert time.monotonic() < deadline, self._process.output
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._processes.kill()


def request(port: int, method: str, path: str, body: bytes = b"", headers: Any = None) -> tuple[int, bytes]:
    """One plain request to this machine: status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Length": str(len(body)), **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Fault(enum.Enum):
    """What a proxy may do to a request besides answering with a status or waiting."""

    DROP = "the connection is closed, the server never sees the request"
    LOSE_ANSWER = "the server does what it was asked, and the connection is closed instead of an answer"
    CUT_ANSWER = "the connection is closed after half of the answer's body"
    FORGET_CONDITION = "the request goes on without If-None-Match, as some servers treat it"
    SILENCE = "the connection stays open, and nothing ever comes"


class Link:
    """A slow link, which all answers share that it is the trouble of.

    Args:
        bytes_per_second: of the answers' bodies.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def send(self, write: Callable[[bytes], object], content: bytes) -> None:
        """Writes `content` piece by piece."""
        for first in range(0, len(content), _PIECE_BYTES):
            piece = content[first : first + _PIECE_BYTES]
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + len(piece) / self._bytes_per_second
                seconds = self._free_at - time.monotonic()
            time.sleep(seconds)
            write(piece)


Trouble = Fault | Link | int | float | None
"""A fault; or a status (int) to answer with, unasked; or seconds (float) to wait before the request goes on; or a link
through which the answer comes."""

Decision = Callable[[str, str], Trouble]
"""What happens to a request, by its method and path."""


class FaultyProxy:
    """Stands between clients and a server.

    Args:
        server: where requests go.
        decide: called for every request.
        code: S3's word for what it answers unasked.

    Attributes:
        troubles: how often each has happened.
    """

    def __init__(self, server: S3Server, decide: Decision, code: str = "Injected") -> None:
        self.url = server.url
        self._text = f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
        self.decide = decide
        self.troubles: Counter[Trouble] = Counter()
        self._server = server
        self._ended = threading.Event()
        self._listener = _Listener(("127.0.0.1", 0), self._handler())
        self.port = int(self._listener.server_address[1])

    def environment(self) -> dict[str, str]:
        """Variables with which a process finds the server through this proxy."""
        return _environment(self.port)

    def __enter__(self) -> Self:
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._listener.shutdown()
        self._listener.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.close_connection = True
                self.raw_requestline = self.rfile.readline(65537)
                with contextlib.suppress(OSError):  # the client is gone
                    if self.raw_requestline and self.parse_request():
                        proxy._pass(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def _pass(self, handler: BaseHTTPRequestHandler) -> None:
        trouble = self.decide(handler.command, handler.path)
        self.troubles[trouble] += 1
        if isinstance(trouble, int):
            handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
            self._answer(handler, trouble, [], self._text)
            return
        if trouble is Fault.DROP:
            return
        if trouble is Fault.SILENCE:
            self._ended.wait()
            return
        if isinstance(trouble, float):
            self._ended.wait(trouble)
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        headers = dict(handler.headers.items())
        if trouble is Fault.FORGET_CONDITION:
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        try:
            connection.request(handler.command, handler.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except OSError:
            return  # the server is down: so is this connection
        finally:
            connection.close()
        if trouble is not Fault.LOSE_ANSWER:
            sent = content[: len(content) // 2] if trouble is Fault.CUT_ANSWER else content
            link = trouble if isinstance(trouble, Link) else None
            self._answer(handler, answer.status, answer.getheaders(), sent, link)

    @staticmethod
    def _answer(
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: Iterable[tuple[str, str]],
        content: bytes,
        link: Link | None = None,
    ) -> None:
        handler.send_response_only(status)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                handler.send_header(name, value)
        handler.send_header("Content-Length", lengths[0] if lengths else str(len(content)))
        handler.send_header("Connection", "close")
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if link:
            link.send(handler.wfile.write, content)
        else:
            handler.wfile.write(content)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def share_of(share: float, *troubles: Trouble, seed: int = 0) -> Decision:
    """Gives trouble, one kind after the other, to about this share of the requests."""
    generator = random.Random(seed)
    lock = threading.Lock()
    kinds = _cycle(troubles)

    def decide(method: str, path: str) -> Trouble:
        with lock:
            return next(kinds) if generator.random() < share else None

    return decide


def first_of(method: str, trouble: Trouble, times: int = 1) -> Decision:
    """Gives trouble to the first requests of one method."""
    left = [trouble] * times

    def decide(asked: str, path: str) -> Trouble:
        return left.pop() if asked == method and left else None

    return decide


def _cycle(troubles: tuple[Trouble, ...]) -> Iterator[Trouble]:
    while True:
        yield from troubles


# The server's own process


class _OneAtATime:
    """moto looks whether an object is there, and then writes it: two requests could both find nothing."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Any:
        with self._lock if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            return self._app(environ, start_response)


def serve(port: int, address: str = "127.0.0.1") -> None:
    """Serves until killed; SIGUSR1 closes the port, SIGUSR2 opens it again. Prints "up" and "down"."""
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
    app = _OneAtATime(DomainDispatcherApplication(create_backend_app))
    while True:
        server = make_server(address, port, app, threaded=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        print("up", flush=True)
        signal.sigwait([signal.SIGUSR1])
        server.shutdown()
        thread.join()
        server.server_close()
        print("down", flush=True)
        signal.sigwait([signal.SIGUSR2])


if __name__ == "__main__":
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    serve(int(sys.argv[1]), *sys.argv[2:])
