"""A password is in nothing that is printed, however it is written and whatever goes wrong."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autoshard.cli import app, doctor
from autoshard.cli.job_log import WithoutPasswords, _Line
from autoshard.errors import AutoshardError
from autoshard.search.study import passwords
from autoshard.search.study.passwords import remember_password, without_password
from autoshard.search.study.storage import open_storage
from tests.jobs.postgres import Server

WORDS = st.text("bcdfghjkmnpqrstvwxzBCDFGHJKLMNPQRSTVWXZ0123456789", min_size=5, max_size=9)
ODD = st.sampled_from(["/", "#", "?", " ", "@", ":", "'", '"', "\\", "%", "&", "=", "+", ";", ",", "é", "%41", "<b>", "`", "$("])  # fmt: skip
SECRETS = st.lists(WORDS | ODD, min_size=1, max_size=5).map("".join).filter(lambda s: len(s) > 4)


def in_url(secret: str, at: str) -> str:
    return f"postgresql://me:{secret}@{at}/postgres"


def libpq_quoted(secret: str) -> str:
    return "'" + secret.replace("\\", "\\\\").replace("'", "\\'") + "'"


WRITTEN: dict[str, Callable[[str, str], str]] = {
    "as it is": in_url,
    "encoded": lambda s, at: in_url(quote(s, safe=""), at),
    "with plus": lambda s, at: in_url(quote_plus(s), at),
    "in the query": lambda s, at: f"postgresql://me@{at}/postgres?password={quote(s, safe='')}",
    "of a key": lambda s, at: f"postgresql://me:x@{at}/postgres?sslpassword={quote_plus(s)}",
    "mysql": lambda s, at: f"mysql://me:{s}@{at}/db",
    "proxy": lambda s, at: f"grpc://me:{s}@{at}/more",
    "keywords": lambda s, at: f"host=127.0.0.1 user=me password={libpq_quoted(s)} dbname=x",
    "spaced keywords": lambda s, at: f"dbname = x password = {libpq_quoted(s)}",
    "no such scheme": lambda s, at: f"redis://me:{s}@{at}",
    "no such port": lambda s, at: in_url(s, "127.0.0.1:port"),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without remembered passwords, and leaves none to others."""
    monkeypatch.setattr(passwords, "_known", {})
    monkeypatch.setattr(doctor, "CONNECT_S", 0.0)


def forms_of(secret: str) -> set[str]:
    """A secret as somebody would grep for it."""
    forms = {secret, quote(secret), quote(secret, safe=""), quote_plus(secret)}
    forms |= {repr(secret)[1:-1], json.dumps(secret)[1:-1], " ".join(secret.split())}
    # A piece of it says too much as well, but for what may be a word of a message.
    forms |= set(re.findall(r"[A-Za-z0-9]{5,}", secret))
    return {form for form in forms if len(form) > 4}


Commands = Callable[[str, Path], list[list[str]]]


def some(where: str, job: Path) -> list[list[str]]:
    return [
        ["doctor", "--json", "--storage", where], ["--debug", "worker", where, "--restarts", "0"],
        ["worker", str(job), "--restarts", "0"], ["diff", where, where],
    ]  # fmt: skip


def many(where: str, job: Path) -> list[list[str]]:
    return [
        *some(where, job), ["doctor", f"--storage={where}"], ["worker", where, "--restarts", "0"],
        ["status", "--storage", "journal:/dev/null/x", "--study", where], ["report", where, "--html", where],
        [where], ["search", f"--odd={where}"], ["--debug", "check", where, where],
    ]  # fmt: skip


def said_of(where: str, folder: Path, commands: Commands = some) -> str:
    """All that is printed and raised where a storage of this name cannot be opened."""
    said = io.StringIO()
    handlers = [logging.StreamHandler(said) for _ in range(3)]
    for handler, formatter in zip(handlers, (_Line(as_json=True), _Line(as_json=False), WithoutPasswords()), strict=True):  # fmt: skip
        handler.setFormatter(formatter)
    logger = logging.getLogger("autoshard")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.level, logger.propagate = handlers, logging.DEBUG, False
    job = folder / "autoshard.toml"
    job.write_text(f'factory = "nothing.py:f"\nstorage = {json.dumps(where)}\nneeds = [{json.dumps(where)}]')  # fmt: skip
    try:
        with redirect_stdout(said), redirect_stderr(said):
            try:
                open_storage(where, patience_s=0.0)
            except AutoshardError as error:
                print(error, repr(error))
            for arguments in commands(where, job):
                app.run(arguments)
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    return said.getvalue()


USUAL: dict[tuple[str, str, Commands], str] = {}
"""What is said of other passwords."""


def check_nothing_is_said(
    written: str, secret: str, server: Server, folder: Path, commands: Commands = some
) -> None:
    at = f"127.0.0.1:{server.port}"
    key = written, at, commands
    if key not in USUAL:
        passwords._known.clear()
        USUAL[key] = said_of(WRITTEN[written]("Zz9-" * 3, at), folder, commands)
    usual = USUAL[key]
    # What any message has ("postgres", say) is not told by this one.
    forms = {form for form in forms_of(secret) if form not in usual}
    passwords._known.clear()
    said = said_of(WRITTEN[written](secret, at), folder, commands)
    assert len(said) > 500
    for form in forms:
        assert form not in said, (form, [line for line in said.splitlines() if form in line])


fuzz = settings(
    deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.mark.parametrize("written", WRITTEN)
@settings(fuzz, max_examples=3)
@given(secret=SECRETS)
def test_no_password_is_printed(written: str, secret: str, server: Server, tmp_path: Path) -> None:
    check_nothing_is_said(written, secret, server, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("written", WRITTEN)
@settings(fuzz, max_examples=100)
@given(secret=SECRETS)
def test_no_password_is_printed_of_many(
    written: str, secret: str, server: Server, tmp_path: Path
) -> None:
    check_nothing_is_said(written, secret, server, tmp_path, many)


@pytest.mark.parametrize("written", ["as it is", "in the query", "keywords", "no such scheme"])
@pytest.mark.parametrize(
    "secret",
    ["s3/cret", "s3#cret", "s3?cret-x", "a b c d", "p@ssword1", "pass:word1", "it's-one", 'q"uote1',
     "back\\slash", "100%sure", "s3%2Fcret", "ünïcode", "x=1&y=2345"],
)  # fmt: skip
def test_passwords_of_every_kind(written: str, secret: str, server: Server, tmp_path: Path) -> None:
    check_nothing_is_said(written, secret, server, tmp_path)


@settings(fuzz, max_examples=400)
@given(secret=SECRETS, around=st.tuples(st.text(), st.text()), data=st.data())
def test_what_was_remembered_is_in_no_text(
    secret: str, around: tuple[str, str], data: st.DataObject
) -> None:
    passwords._known.clear()
    remember_password(in_url(quote(secret, safe=""), "host"))
    before, after = around
    quoted: Any = data.draw(st.sampled_from([str, repr, json.dumps, quote, quote_plus]))
    assume(secret not in before + after)
    said = without_password(f"{before}{quoted(secret)}{after}")
    assert secret not in said
    assert quoted(secret).strip("'\"") not in said


@settings(fuzz, max_examples=400)
@given(secret=SECRETS.filter(lambda s: not re.search(r"\s", s)))
def test_what_nobody_named_is_hidden_by_its_place(secret: str) -> None:
    passwords._known.clear()
    assume(secret not in "could not connect to postgresql://me:***@host/db?password=***")
    assert secret not in without_password(f"could not connect to {in_url(secret, 'host')} (x)")
    assert secret not in without_password(f"host=h password={libpq_quoted(secret)} user=me")
    encoded = quote(secret, safe="")
    assert encoded not in without_password(f"mysql://me@host/db?password={encoded}&ssl=1")


def test_what_is_no_password_stays() -> None:
    for text in (
        "postgresql://me@host:5432/studies?sslmode=require", "grpc://host:50051 is away (x@y.org)",
        "rule wq.1->model (optimizer) @last", "journal:/shared/study@home.log", "sqlite:////a/b@c.db",
        "password authentication failed for user \"me\"", "unexpected token: ->", "http://h:80/a, x@y",
    ):  # fmt: skip
        assert without_password(text) == text
    for where in ("postgresql://me@host:5432/studies?sslmode=require", "sqlite:////a/b@c.db"):
        remember_password(where)
        assert without_password(where) == where


def test_which_part_is_the_password_must_be_clear() -> None:
    for where in (
        "postgresql://me:a@b@host/db",
        "mysql://me:a@b?c@host/db",
        "postgresql://me/x:pw1@host",
    ):
        with pytest.raises(AutoshardError, match=r"Write each other @ as %40"):
            open_storage(where, patience_s=0.0)
