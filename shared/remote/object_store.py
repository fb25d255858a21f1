"""Files behind a URL, through fsspec: object stores, web servers, the Hub. They are read by ranges of bytes.

In reading, errors that pass, such as an overloaded server or a broken connection, are retried. Errors that stay, such
as a missing file or refused access, become a `UserError` at once. Writing raises whatever the client library raises.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from shared.disk import is_url
from shared.errors import UserError, error_in_words

PATIENCE = 300.0  # seconds for which a request is retried
PATIENCE_AT_START = 30.0  # the same for the first file: a URL with a typing error should not take minutes
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds between two attempts; each pause is twice as long as the one before
REQUEST_SECONDS = 60.0  # without an answer, a request has failed
DAMAGED_READS = 3  # bytes that differ from the index so often are not damaged on their way
OPTIONS: dict[str, dict[str, Any]] = {
    **{key: {"config_kwargs": {"max_pool_connections": 64}} for key in ("s3", "s3a")},  # otherwise ten at once
    "file": {"auto_mkdir": True},  # object stores have no folders that must exist before their files
}
RETRIED = {408, 425, 429}  # HTTP statuses of the client's errors that pass
STAYING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,  # a client that is not installed
    ValueError,  # an unknown kind of URL
    TypeError,
    NotImplementedError,
)


@dataclass(frozen=True)
class RemoteFolder:
    """A folder behind a URL.

    The connection belongs to the process that reads, also after a fork. Any number of threads may read at once.
    """

    url: str
    flag: str  # the flag that names it, for messages

    def __post_init__(self) -> None:
        """Refuse a path, and a password in the URL: config.yaml would store it, and messages would print it."""
        if not is_url(self.url):
            raise UserError(f"{self.flag} {self.url} is no URL: give one such as s3://bucket/run or file:///mnt/run")
        found = urlsplit(self.url)
        if found.scheme == "file" and found.netloc not in ("", "~"):  # fsspec would use a folder of this name here
            raise UserError(f"{self.flag} {self.url} names no path of this machine: write file:///, with three slashes")
        if found.password is not None:
            shown = found._replace(netloc=found.netloc.rpartition("@")[2]).geturl()
            raise UserError(
                f"{self.flag} {shown} is given with a password, which config.yaml would store: leave it out, and give "
                "it to the client (docs/pretraining.md, Passwords)"
            )

    def read(
        self,
        name: str,
        span: range | None = None,
        intact: Callable[[bytes], bool] = lambda _: True,
        patience: float = PATIENCE,
    ) -> bytes:
        """The bytes `span` of a file, or all of it.

        Args:
            name: the path of the file in the folder.
            span: positions of the bytes.
            intact: whether bytes are those that were prepared.
            patience: seconds for which errors that pass are retried.

        Raises:
            UserError: the file is missing, refused, no `span`, or not intact; or the errors have not passed.
        """
        deadline, pause, damaged, renewed = time.monotonic() + patience, FIRST_PAUSE, 0, False
        source = f"{self.flag} {self.url.rstrip('/')}/{name}"
        while True:
            try:
                found = self._request(name, span)
            except Exception as error:  # each client library has its own exceptions
                problem = f"cannot be read ({failure_in_words(error)}): check the URL, the credentials and the network"
                if isinstance(error, FileNotFoundError) or _status(error) == 404:
                    problem = "does not exist: check the URL, or copy the prepared folder there again"
                if isinstance(error, PermissionError) and not renewed:
                    renewed = True
                    self.reopen()  # the credentials may have expired, and have been renewed in their file
                    continue
                if _stays(error):
                    raise UserError(f"{source} {problem}") from None
            else:
                if (span is None or len(found) == len(span)) and intact(found):
                    return found
                damaged += 1
                problem = (
                    "differs from its index, was cut short, or was sent without ranges: copy the folder there again"
                )
            if damaged == DAMAGED_READS or time.monotonic() + pause > deadline:
                raise UserError(f"{source} {problem}")
            _say_that_it_waits(f"{source} {problem}; trying again for up to {patience:.0f} s")
            time.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))  # processes that failed together spread out
            pause = min(2 * pause, LONGEST_PAUSE)

    def sizes(self) -> dict[str, int]:
        """The bytes of each file in the folder and below, by its path in the folder."""
        files, folder = _opened(self.url, os.getpid())
        files.invalidate_cache()
        found = files.find(folder, detail=True)
        return {path.removeprefix(f"{folder.rstrip('/')}/"): each["size"] for path, each in found.items()}

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file, or replace it. An error leaves the old file, the new one, or the beginning of the new one."""
        files, folder = _opened(self.url, os.getpid())
        with files.open(f"{folder.rstrip('/')}/{name}", "wb") as file:
            for piece in pieces:
                file.write(piece)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it."""
        files, folder = _opened(self.url, os.getpid())
        files.rm(f"{folder.rstrip('/')}/{name}", recursive=True)

    def reopen(self) -> None:
        """Read credentials again at the next request: those in a file may have been renewed."""
        from fsspec import get_filesystem_class

        get_filesystem_class(self.url.partition("://")[0]).clear_instance_cache()
        _opened.cache_clear()

    def _request(self, name: str, span: range | None) -> bytes:
        files, folder = _opened(self.url, os.getpid())
        limits: dict[str, Any] = {} if span is None else {"start": span.start, "end": span.stop}
        if files.async_impl:
            limits["timeout"] = REQUEST_SECONDS
        return bytes(files.cat_file(f"{folder.rstrip('/')}/{name}", **limits))


@lru_cache
def _opened(url: str, process: int) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it; a process must not use that of its parent."""
    from fsspec.core import url_to_fs

    found: tuple[Any, str] = url_to_fs(url, **OPTIONS.get(url.partition("://")[0], {}))
    return found


def failure_in_words(error: Exception) -> str:
    """An exception in at most one line."""
    status = _status(error)
    return error_in_words(error) if status is None else f"HTTP {status}"


def _status(error: Exception) -> int | None:
    """The HTTP status of an exception of aiohttp, requests, huggingface_hub or gcsfs; None if it has none."""
    response = getattr(error, "response", None)
    found = getattr(error, "status", None), getattr(response, "status_code", None), getattr(error, "code", None)
    return next((int(status) for status in map(str, found) if status.isdecimal()), None)


def _stays(error: Exception) -> bool:
    """Whether another attempt would fail as well."""
    status = _status(error)
    return isinstance(error, STAYING) or (status is not None and 400 <= status < 500 and status not in RETRIED)


_told = -PATIENCE  # when this process last printed that it waits


def _say_that_it_waits(line: str) -> None:
    """Print a line to stderr, at most once in PATIENCE seconds: many requests fail together."""
    global _told  # noqa: PLW0603
    if time.monotonic() - _told >= PATIENCE:
        _told = time.monotonic()
        print(f"rank {os.environ.get('RANK', 0)}: {line}", file=sys.stderr, flush=True)
