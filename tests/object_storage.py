"""Object storage on this machine: S3 by moto, and an HTTP server that can be slow, fail, and count
what is read."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest


class ObjectServer(ThreadingHTTPServer):
    """Serves the files of a folder by range.

    `failing` requests from now on are answered with 503, and each waits `delay` seconds for its
    answer. With `ranges=False` a file comes as a whole. While `gone` says so there are no files.
    """

    daemon_threads, request_queue_size = True, 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.failing, self.delay, self.ranges = folder, 0, 0.0, True
        self.gone: Callable[[], bool] = bool
        self.read: list[tuple[str, int, int]] = []  # file, start, end
        self.waiting = self.most_waiting = 0  # requests at the same time
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has ended."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        status, content = self._find()
        self._send(status, content, content)

    def do_GET(self) -> None:
        status, content = self._find()
        whole = content
        found = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if status == 200 and found and self.server.ranges:
            start, end = int(found[1]), int(found[2]) + 1
            self.server.read.append((Path(self.path).name, start, end))
            status, content = 206, content[start:end]
        self._send(status, content, whole)
        self.wfile.write(content)

    def _find(self) -> tuple[int, bytes]:
        self.server.waiting += 1
        self.server.most_waiting = max(self.server.most_waiting, self.server.waiting)
        time.sleep(self.server.delay)
        self.server.waiting -= 1
        path = self.server.folder / self.path.lstrip("/")
        if self.server.failing:
            self.server.failing -= 1
            return 503, b""
        if not path.is_file() or self.server.gone():
            return 404, b""
        return 200, path.read_bytes()

    def _send(self, status: int, content: bytes, whole: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status in (200, 206):
            self.send_header("ETag", f'"{hash(whole)}"')
        self.end_headers()


@contextmanager
def serve_files(folder: Path) -> Iterator[ObjectServer]:
    with ObjectServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Bucket:
    """A bucket of an S3 server; `files` are sent to it as they are named."""

    def __init__(self, name: str, client: Any) -> None:
        self.url, self.name, self.client = f"s3://{name}", name, client
        client.create_bucket(Bucket=name)

    def put(self, name: str, file: Path) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=file.read_bytes())

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=name)


@contextmanager
def serve_s3() -> Iterator[Any]:
    """A client of a server that is found by the environment, as users name theirs."""
    import boto3
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # what an earlier server of this process left: its buckets, and fsspec's client of its address
    urlopen(f"http://{host}:{port}/moto-api/reset", data=b"")
    S3FileSystem.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        try:
            yield boto3.client("s3")
        finally:
            server.stop()
