"""Logging of long jobs: one line an event, as text or as JSON, without passwords."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time

from autoshard.search.study.passwords import without_password


class WithoutPasswords(logging.Formatter):
    """Messages and tracebacks of any logger, without passwords."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of an event."""
        return without_password(super().format(record))


class _Line(WithoutPasswords):
    """One event a line."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__("%(message)s")
        self._as_json, self._host = as_json, socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        message = " ".join(super().format(record).split())
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        when = f"{seconds}.{int(record.msecs):03d}Z"
        if not self._as_json:
            return f"{when} {self._host}:{os.getpid()} {record.levelname} {message}"
        event = {
            "time": when,
            "host": self._host,
            "pid": os.getpid(),
            "level": record.levelname,
            "logger": record.name,
            "event": message,
        }
        return json.dumps(event)


def log_events(level: int, *, as_json: bool) -> None:
    """Sends the package's events to standard error.

    Args:
        level: Of `logging`; INFO shows each claim and result.
        as_json: One JSON object a line, for log collectors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line(as_json=as_json))
    logger = logging.getLogger("autoshard")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
