"""Listening on ports, and saying who has a port that is taken.

The one rule: addresses are host:port; port 0 takes a free one, and the address that comes back is the real one.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc

from shared.errors import StartError

_LISTEN: Final = "0A"


class PortTaken(StartError):
    """A port is taken. `pid` and `name` are of the process that has it, None where that cannot be seen."""

    def __init__(self, address: str, pid: int | None, name: str | None) -> None:
        by = f"process {pid} ({name})" if pid is not None else "another process"
        super().__init__(f"port {split(address)[1]} is taken by {by}: cannot listen on {address}")
        self.port = split(address)[1]
        self.pid = pid
        self.name = name


def split(address: str) -> tuple[str, int]:
    """Host and port of host:port or [v6]:port. Raises StartError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise StartError(f"`{address}` is not an address of the form host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def bind(server: grpc.aio.Server, address: str) -> str:
    """Add an insecure port to a server that has not started; the real host:port. Raises PortTaken, StartError."""
    # grpc explains a failed bind with a page of log and no cause, so a plain socket tries first.
    listen(address).close()
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as exc:
        raise PortTaken(address, *_owner(split(address)[1])) from exc
    return f"{address.rpartition(':')[0]}:{port}"


def listen(address: str) -> socket.socket:
    """A listening TCP socket. Raises PortTaken, StartError."""
    host, port = split(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as exc:
        raise StartError(f"cannot listen on {address}: the host {host} is not known") from exc
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(1024)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortTaken(address, *_owner(port)) from exc
        raise StartError(f"cannot listen on {address}: {os.strerror(exc.errno or 0).lower()}") from exc
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket) -> str:
    """host:port of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(address: str, advertise: str) -> str:
    """The address under which others reach a port of this process: host:port, the host being `advertise` if given."""
    return f"{advertise}:{address.rpartition(':')[2]}" if advertise else address


def _owner(port: int) -> tuple[int | None, str | None]:
    """Pid and name of the process that listens on `port`, as far as /proc shows it."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        try:
            if str(link.readlink()) in sockets:
                pid = int(link.parts[2])
                return pid, _name(pid)
        except OSError:
            continue  # the process ended, or belongs to someone else
    return None, None


def _inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue  # no such table: another system, or no IPv6
        for columns in map(str.split, lines):
            if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]


def _name(pid: int) -> str:
    """The program's name; for `python -m module` with the module. Other arguments may be secret."""
    argv = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
    name = os.path.basename(argv[0])
    return f"{name} -m {argv[2]}" if argv[1:2] == ["-m"] and len(argv) > 2 else name
