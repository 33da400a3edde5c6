"""A journal file that many processes append to, and that survives what happens to files.

Optuna's journal stops every reader for good at a record that a kill, a full disk or a crashed node
cut short. Here a line that is no JSON object is skipped with one warning, a record still being
written is left for the next read, an append that fails is taken back, and one that follows a cut
record starts a line of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from optuna.storages.journal import BaseJournalBackend, JournalFileSymlinkLock

log = logging.getLogger("autoshard.jobs")

LOCK_GRACE_S = 15
"""A lock whose holder wrote nothing for this long was left by one that was killed. Chosen by hand:
writing takes milliseconds, and Optuna warns below a few seconds; tests of killed workers set 1."""

FILE_MODE = 0o660
"""Of a new journal, less the umask: never open to others. `test_a_journal_is_not_open_to_others`
checks it."""


class Journal(BaseJournalBackend):
    """Optuna's journal format in a file, tolerant of broken lines; one per process and file."""

    def __init__(self, path: str) -> None:
        """Makes the file where there is none.

        Args:
            path: Of the journal; beside it come the locks.
        """
        self._path = path
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, FILE_MODE))
        self._lock = JournalFileSymlinkLock(path, grace_period=LOCK_GRACE_S)
        self._read, self._offset = 0, 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The records from a number on; broken lines have no number."""
        if log_number_from < self._read:
            self._read, self._offset = 0, 0
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # being written, or cut: then the next append ends it
                record = self._record(line)
                self._offset += len(line)
                if record is None:
                    continue
                self._read += 1
                if self._read > log_number_from:
                    yield record

    def _record(self, line: bytes) -> dict[str, Any] | None:
        """The record in a line; None, with a warning, where there is none."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("op_code"), int):
            return record
        if line.strip():
            log.warning(
                "%s: skipped a broken record at byte %d (%d bytes)",
                self._path,
                self._offset,
                len(line),
            )
        return None

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends records, all or none."""
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in logs).encode()
        self._lock.acquire()
        try:
            self._append(text)
        finally:
            # Where it was taken for a dead process's lock meanwhile, it is not ours to release.
            with contextlib.suppress(RuntimeError):
                self._lock.release()

    def _append(self, text: bytes) -> None:
        # Unbuffered: what was written has to be known, so that it can be taken back.
        with open(self._path, "r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":  # a record that was cut short
                    text = b"\n" + text
            written = 0
            try:
                while written < len(text):
                    written += os.pwrite(file.fileno(), text[written:], end + written)
            except OSError:  # the disk is full, say
                if written < len(text):
                    with contextlib.suppress(OSError):
                        os.ftruncate(file.fileno(), end)
                raise
            os.fsync(file.fileno())
