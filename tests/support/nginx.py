"""nginx before a server, as a site may have it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_START_S = 20.0

CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port} http2;
        {settings}
        location / {{
            grpc_pass grpc://127.0.0.1:{target};
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(target: int, folder: Path, settings: str = "") -> Iterator[int]:
    """nginx with ``grpc_pass`` to a port of loopback, and its own defaults but for ``settings``; its port.

    The test is skipped where nginx is not installed.
    """
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("nginx is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    text = CONFIGURATION.format(folder=folder, port=port, target=target, settings=settings)
    (folder / "nginx.conf").write_text(text, encoding="utf-8")
    process = subprocess.Popen(
        [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")],
        stdin=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        assert process.poll() is None, "nginx has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.05)
    raise AssertionError("nginx does not listen")
