"""A PostgreSQL server for tests: Debian's own, in a temporary directory, as a user who is not
root."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PASSWORD = "s3cret-of-the-test"


@dataclass(frozen=True)
class Server:
    """A running server."""

    programs: Path
    data: Path
    port: int

    @property
    def url(self) -> str:
        return f"postgresql://autoshard:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *arguments: str) -> None:
        """Runs one of PostgreSQL's programs as the server's user.

        Raises:
            CalledProcessError: If it fails.
        """
        command = [str(self.programs / program), *arguments]
        if os.getuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=self.data.parent)

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.data.parent}"
        self.run(
            "pg_ctl",
            "start",
            "-w",
            "-D",
            str(self.data),
            "-l",
            str(self.data / "log"),
            "-o",
            options,
        )

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self.data))


def programs() -> Path | None:
    """Where PostgreSQL's programs are; None without it."""
    found = [
        shutil.which("pg_ctl"),
        *sorted(glob.glob("/usr/lib/postgresql/*/bin/pg_ctl"), reverse=True),
    ]
    real = [Path(path).resolve().parent for path in found if path]
    return real[0] if real else None


@contextmanager
def postgres() -> Iterator[Server]:
    where = programs()
    assert where is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="autoshard-postgres-"))
    server = Server(where, folder / "data", port)
    try:
        (folder / "password").write_text(PASSWORD)
        if os.getuid() == 0:
            for path in (folder, folder / "password"):
                shutil.chown(path, "postgres")
        server.run(
            "initdb", "-D", str(server.data), "-U", "autoshard", "-A", "scram-sha-256", "--no-sync",
            f"--pwfile={folder / 'password'}",
        )  # fmt: skip
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
