"""nginx and HAProxy before a server, as a site may have them."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_START_S = 20.0
_FOLDERS = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"

_NGINX = """
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

_HAPROXY = """
defaults
    timeout connect 5s
    timeout client 1m
    timeout server 1m
    {settings}
listen afl
    bind 127.0.0.1:{port} {protocol}
    server afl 127.0.0.1:{target} {protocol}
"""


@contextlib.contextmanager
def nginx(target: int, folder: Path, settings: str = "") -> Iterator[int]:
    """nginx with ``grpc_pass`` to a port of loopback, and its own defaults but for ``settings``; its port."""
    program = _program("nginx")
    port = _free_port()
    configuration = _written(
        folder, _NGINX.format(folder=folder, port=port, target=target, settings=settings)
    )
    log = str(folder / "error.log")
    with _running([program, "-p", str(folder), "-c", str(configuration), "-e", log], port):
        yield port


@contextlib.contextmanager
def haproxy(target: int, folder: Path, *, mode: str) -> Iterator[int]:
    """HAProxy before a port of loopback, in mode ``tcp`` or ``http``; its port."""
    program = _program("haproxy")
    port, protocol = _free_port(), "proto h2" if mode == "http" else ""
    text = _HAPROXY.format(port=port, target=target, protocol=protocol, settings=f"mode {mode}")
    with _running([program, "-db", "-f", str(_written(folder, text))], port):
        yield port


def _program(name: str) -> str:
    found = shutil.which(name, path=_FOLDERS)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "proxy.conf"
    path.write_text(text, encoding="utf-8")
    return path


@contextlib.contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_S
        while True:
            assert process.poll() is None, f"{command[0]} has ended"
            assert time.monotonic() < until, f"{command[0]} does not listen"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                break
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
