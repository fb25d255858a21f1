"""Files behind a URL, read by ranges of bytes through fsspec: object stores, web servers, the Hub.

Errors that pass, such as an overloaded server or a broken connection, are retried. Errors that stay, such as a missing
file or wrong credentials, become a `UserError` at once.
"""

import errno
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from shared.errors import UserError

PATIENCE = 300.0  # seconds for which a request is retried
PATIENCE_AT_START = 30.0  # the same for the first file: a URL with a typing error should not take minutes
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds between two attempts; each pause is twice as long as the one before
REQUEST_SECONDS = 60.0  # without an answer, a request has failed
CONNECTIONS = 64  # of a process
DAMAGED_READS = 3  # bytes that differ from the index so often are not damaged on their way
CLIENTS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
CLIENTS |= {"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "oci": "ocifs", "oss": "ossfs"}
"""The package that reads each kind of URL, if fsspec does not read it alone."""

OPTIONS = {key: {"config_kwargs": {"max_pool_connections": CONNECTIONS}} for key in ("s3", "s3a")}
"""Arguments of fsspec's file systems; without this, botocore makes at most ten requests at once."""

RETRIED = {408, 425, 429}  # HTTP statuses of the client's errors that pass
STAYING_ERRNOS = {errno.EINVAL, errno.EPERM, errno.EREMCHG, errno.ENAMETOOLONG, errno.ENOSYS}  # as s3fs uses them
STAYING = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "InvalidURL", "GatedRepoError"} | {
    "ClientConnectorCertificateError",
    "DefaultCredentialsError",
    "NotImplementedError",
    "ValueError",
    "TypeError",
    "ImportError",
}
"""Names of exceptions that stay; the packages that define them may be missing."""


@dataclass(frozen=True)
class RemoteFolder:
    """A folder behind a URL.

    The connection belongs to the process that reads, also after a fork. Any number of threads may read at once.
    """

    url: str
    flag: str  # the flag that names it, for messages

    def __post_init__(self) -> None:
        """Refuse a password in the URL: config.yaml would store it, and messages would print it."""
        found = urlsplit(self.url)
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
        patience: float | None = None,
    ) -> bytes:
        """The bytes `span` of a file, or all of it.

        Args:
            name: the path of the file in the folder.
            span: positions of the bytes.
            intact: whether bytes are those that were prepared.
            patience: seconds for which errors that pass are retried. None: PATIENCE.

        Raises:
            UserError: the file is missing, refused, shorter than `span`, or not intact; or the errors have not passed.
        """
        patience = PATIENCE if patience is None else patience
        deadline, pause, damaged = time.monotonic() + patience, FIRST_PAUSE, 0
        while True:
            try:
                found = self._request(name, span)
            except Exception as error:  # each client library has its own exceptions
                if _stays(error):
                    raise UserError(self._refusal(name, error)) from None
                problem, fix = f"cannot be read ({described(error)})", "check the URL, the server and the network"
            else:
                if span is not None and len(found) > len(span):
                    raise UserError(f"{self._of(name)}: the server ignores ranges of bytes: use one that supports them")
                if (span is None or len(found) == len(span)) and intact(found):
                    return found
                damaged += 1
                cut = span is not None and len(found) < len(span)
                problem = "is shorter than its index says" if cut else "differs from its index"
                fix = "it was cut short or changed after it was prepared: copy the prepared folder there again"
            if damaged == DAMAGED_READS or time.monotonic() + pause > deadline:
                raise UserError(f"{self._of(name)} {problem}: {fix}")
            _say_that_it_waits(f"{self._of(name)} {problem}; trying again for up to {patience:.0f} s")
            time.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))  # processes that failed together spread out
            pause = min(2 * pause, LONGEST_PAUSE)

    def _request(self, name: str, span: range | None) -> bytes:
        files, folder = self._file_system()
        limits: dict[str, Any] = {} if span is None else {"start": span.start, "end": span.stop}
        if files.async_impl:
            limits["timeout"] = REQUEST_SECONDS
        return bytes(files.cat_file(f"{folder.rstrip('/')}/{name}", **limits))

    def _file_system(self) -> tuple[Any, str]:
        """fsspec's file system of this process, and the folder in it."""
        try:
            return _opened(self.url, os.getpid())
        except ImportError as error:
            client = CLIENTS.get(self.url.partition("://")[0])
            fix = f"pip install {client}" if client else described(error)
            raise UserError(f"{self.flag} {self.url} needs a package that is not installed: {fix}") from None
        except ValueError as error:
            raise UserError(f"{self.flag} {self.url}: {error}: use s3://, gs://, hf:// or https://") from None

    def _of(self, name: str) -> str:
        return f"{self.flag} {self.url.rstrip('/')}/{name}"

    def _refusal(self, name: str, error: Exception) -> str:
        if isinstance(error, UserError):
            return str(error)
        if isinstance(error, FileNotFoundError) or _status(error) in (404, 410):
            return f"{self._of(name)} does not exist: check the URL, or copy the prepared folder there again"
        if _status(error) == 416:
            return f"{self._of(name)} is shorter than its index says: copy the prepared folder there again"
        if isinstance(error, PermissionError) or _status(error) in (401, 403) or "Credentials" in type(error).__name__:
            return f"{self._of(name)}: access is denied ({described(error)}): check the credentials and their rights"
        return f"{self._of(name)} cannot be read ({described(error)}): check the URL"


@lru_cache
def _opened(url: str, process: int) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it; a process must not use that of its parent."""
    from fsspec.core import url_to_fs

    found: tuple[Any, str] = url_to_fs(url, **OPTIONS.get(url.partition("://")[0], {}))
    return found


def described(error: Exception) -> str:
    """An exception in at most one line."""
    if (status := _status(error)) is not None:
        return f"HTTP {status}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {lines[0]:.200}' if lines else ''}"


def _status(error: Exception) -> int | None:
    """The HTTP status of an exception of aiohttp, requests, huggingface_hub or gcsfs; None if it has none."""
    for found in (getattr(error, "status", None), getattr(getattr(error, "response", None), "status_code", None)):
        if isinstance(found, int):
            return found
    code = str(getattr(error, "code", ""))
    return int(code) if code.isdecimal() else None


def _stays(error: Exception) -> bool:
    """Whether another attempt would fail as well."""
    if isinstance(error, UserError | FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return True
    if (status := _status(error)) is not None:
        return 400 <= status < 500 and status not in RETRIED
    if isinstance(error, OSError) and error.errno in STAYING_ERRNOS:
        return True
    return bool(STAYING & {kind.__name__ for kind in type(error).__mro__})


_told = -PATIENCE  # when this process last printed that it waits


def _say_that_it_waits(line: str) -> None:
    """Print a line to stderr, at most once in PATIENCE seconds: many requests fail together."""
    global _told  # noqa: PLW0603
    if time.monotonic() - _told >= PATIENCE:
        _told = time.monotonic()
        print(f"rank {os.environ.get('RANK', 0)}: {line}", file=sys.stderr, flush=True)
