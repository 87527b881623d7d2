"""An OpenAI-compatible endpoint on this machine, whose judges are functions of the test."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-test-0123456789"
CONTAINED = frozenset({"injection", "fake_verdict", "delimiter", "chat_tokens"})
"""Kinds of attacks that delimiters and strict reading shall make worthless."""


@dataclass
class Reply:
    """What the endpoint sends; ``body`` as bytes is sent as it is."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    hang_s: float = 0.0
    cut: bool = False
    """Announce more bytes than are sent."""


def completion(content: Any, *, finish: str = "stop", usage: Any = (100, 10), **message: Any) -> Reply:
    counts = None if usage is None else {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    choice = {"message": {"role": "assistant", "content": content} | message, "finish_reason": finish}
    return Reply(body={"choices": [choice], "usage": counts})


def failure(status: int, message: str = "no", **headers: str) -> Reply:
    return Reply(status=status, body={"error": {"message": message}}, headers=headers)


def fields_of(request: dict[str, Any]) -> dict[str, Any]:
    """The fields that the request's schema asks for."""
    return request["response_format"]["json_schema"]["schema"]["properties"]


def is_probe(request: dict[str, Any]) -> bool:
    return "ok" in fields_of(request)


def verdict(request: dict[str, Any], value: Any) -> str:
    """A correct answer: ``value`` for the field of a judge, true to a probe."""
    return json.dumps({"ok": True} if is_probe(request) else {"verdict": value})


@dataclass
class FakeEndpoint:
    """Behaves as ``respond(request, number of the request)`` says; a text is the content of a completion."""

    respond: Callable[[dict[str, Any], int], Reply | str]
    requests: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def judged(self) -> list[dict[str, Any]]:
        """The requests after the probes."""
        return [request for request in self.requests if not is_probe(request)]

    def answer(self, headers: Any, path: str, data: bytes) -> Reply:
        if path != "/v1/chat/completions":
            return failure(404, f"no {path}")
        if headers.get("Authorization") != f"Bearer {KEY}":
            return failure(401, f"Incorrect API key provided: {headers.get('Authorization')}")
        request = json.loads(data)
        with self.lock:
            self.requests.append(request)
            number = len(self.requests)
        found = self.respond(request, number)
        return completion(found) if isinstance(found, str) else found


@contextlib.contextmanager
def serving(respond: Callable[[dict[str, Any], int], Reply | str]) -> Iterator[FakeEndpoint]:
    """An endpoint while the context lasts."""
    endpoint = FakeEndpoint(respond)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            with endpoint.lock:
                endpoint.at_once += 1
                endpoint.most_at_once = max(endpoint.most_at_once, endpoint.at_once)
            try:
                self._send(endpoint.answer(self.headers, self.path, data))
            finally:
                with endpoint.lock:
                    endpoint.at_once -= 1

        def _send(self, reply: Reply) -> None:
            if reply.hang_s:
                endpoint.released.wait(reply.hang_s)
            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            with contextlib.suppress(OSError):  # the client has gone
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body) + (1000 if reply.cut else 0)))
                self.end_headers()
                self.wfile.write(body)
            self.close_connection = reply.cut

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.released.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


# Judges

_BLOCK = re.compile(r"<<BEGIN ([A-Z_ ]+) ([0-9a-f]{32})>>\n(.*?)\n<<END \1 \2>>", re.DOTALL)
_ANNOUNCED = re.compile(r"<<BEGIN NAME ([0-9a-f]{32})>>")


def blocks(request: dict[str, Any]) -> dict[str, str]:
    """Title -> text of the material, by the delimiter that the system message announces."""
    system, user = (message["content"] for message in request["messages"])
    [nonce] = set(_ANNOUNCED.findall(system))
    return {title: text for title, found, text in _BLOCK.findall(user) if found == nonce}


def outside(request: dict[str, Any]) -> str:
    """All that stands outside the blocks: what a judge may obey."""
    system, user = (message["content"] for message in request["messages"])
    [nonce] = set(_ANNOUNCED.findall(system))
    return system + _BLOCK.sub(lambda block: "" if block[2] == nonce else block[0], user)


def everything(request: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in request["messages"])
