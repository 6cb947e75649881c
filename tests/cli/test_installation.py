"""The image of `docker build`, and the package as it is published."""

import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from uv import find_uv_bin

from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("command", "status", "is_healthy"),
    [("serve", 200, True), ("serve", 503, False), ("serve", None, False), ("train", None, True)],
)
def test_the_image_asks_a_server_for_its_health_and_nothing_else(
    command: str,
    status: int | None,
    is_healthy: bool,
    tmp_path: Path,
) -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    (check,) = re.findall(r"^HEALTHCHECK (.*)", text, re.MULTILINE)
    (tmp_path / "cmdline").write_bytes(f"python\0vit\0{command}\0imagenette\0".encode())
    script = check.partition("CMD ")[2].replace("/proc/1/cmdline", str(tmp_path / "cmdline"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            self.send_response(status or 0)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    if status is None:
        server.server_close()
    else:
        threading.Thread(target=server.handle_request, daemon=True).start()
    script = script.replace("8000", str(server.server_port))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    outcome = subprocess.run(["sh", "-c", script], env=environment, capture_output=True)
    server.server_close()
    assert (outcome.returncode == 0) == is_healthy, outcome.stderr


@pytest.mark.extended
def test_the_package_is_one_that_an_index_shows(tmp_path: Path) -> None:
    """Needs the package index: for hatchling, and for twine."""
    uv = find_uv_bin()
    subprocess.run([uv, "build", "--quiet", "--out-dir", tmp_path, ROOT], check=True)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    subprocess.run([uv, "tool", "run", "twine", "check", "--strict", wheel, source], check=True)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        page = archive.read(metadata).decode().partition("\n\n")[2]
    assert "vit/configs/digits.yaml" in names
    assert page.startswith("# vit\n")
    links = re.findall(r"\]\(([^)]*)", page)
    assert len(links) > 5
    assert [link for link in links if not link.startswith("https://")] == []
    with tarfile.open(source) as file:
        folders = {"/".join(name.split("/")[1:3]) for name in file.getnames()}
    assert "vit/api.py" in folders
    assert "benchmarks/results" not in folders
