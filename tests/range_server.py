"""A web server on this machine that serves a folder by ranges of bytes, with delays and errors: a slow object store."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = Callable[[str, int], int | None]  # (path, requests of it so far) -> an HTTP status to answer with, or None


class RangeServer:
    """Serves `folder` at `url` while its `with` block runs.

    Args:
        folder: its files are served.
        delay: seconds before each answer.
        answer: the status of an error to answer with; None serves the file.
    """

    def __init__(self, folder: Path, delay: float = 0.0, answer: Answer = lambda path, count: None) -> None:
        self.folder, self.delay, self.answer = folder, delay, answer
        self.requests: Counter[str] = Counter()  # the number of requests of each path
        self._lock = threading.Lock()

    def __enter__(self) -> "RangeServer":
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and content are sent separately

            def do_GET(self) -> None:
                outer._serve(self)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.lstrip("/")
        time.sleep(self.delay)
        with self._lock:
            error = self.answer(path, self.requests[path])
            self.requests[path] += 1
        status, content = (error, b"") if error else self._content(path, request.headers.get("Range"))
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _content(self, path: str, span: str | None) -> tuple[int, bytes]:
        """The status and the bytes of a range such as "bytes=0-99", or of the whole file."""
        file = self.folder / path
        if not file.is_file():
            return 404, b""
        if span is None:
            return 200, file.read_bytes()
        first, last = map(int, span.removeprefix("bytes=").split("-"))
        with file.open("rb") as opened:
            opened.seek(first)
            content = opened.read(last + 1 - first)
        return (206, content) if content else (416, b"")
