"""Keeps passwords out of everything that is printed: messages, logs, tables, reports.

Two ways, since either alone leaks. What a user names as a storage is read by the parser that
connects (SQLAlchemy's `make_url`, psycopg's for libpq's keywords), and its secrets are remembered
as they were written, decoded, and as messages quote them: from then on they are cut out of every
text. And what looks like a password in a text that nobody named is cut out by its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from autoshard.errors import StudyError
from autoshard.text import printable

HIDDEN = "***"

SHORTEST = 4
"""Characters of a secret that is looked for in every text: a shorter one is a part of many words,
and is hidden by its place alone. Chosen by hand; no test depends on it."""

_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")

_USER_PASSWORD = re.compile(r"(:/+[^/?#\s:@]*):\S*@")
"""In a text: up to the last `@` of a word, whatever is before it (`Path` makes one `/` of two)."""

_SPACED_PASSWORD = re.compile(r"(:/+[^/?#\s:@]*):(?!\d+(?:[/?#,;:.)'\"\s]|$))[^@\n]*@")
"""The same with white space in it; digits are rather a port, with other text behind it."""

_SECRET_NAME = r"\w*(?:password|passwd|pwd|passphrase|secret|token)"
_QUERY_NAME = re.compile(_SECRET_NAME, re.IGNORECASE)

_NAMED_SECRET = re.compile(
    rf"(?i)\b({_SECRET_NAME})(\s*=\s*|['\"]\s*:\s*)"
    r"""('(?:[^'\\]|\\.)*(?:'|$)|"(?:[^"\\]|\\.)*(?:"|$)|(?:\\.|[^\s&;'"\\])(?:\\.|[^\s&;\\])*)"""
)
"""`name=value` of a URL's query or of libpq's keywords (quotes, backslashes), `"name": value`."""

_LIBPQ_NAMES = (
    "host|hostaddr|port|dbname|user|password|passfile|service|options|application_name|"
    "connect_timeout|sslmode|sslcert|sslkey|sslpassword|sslrootcert|target_session_attrs"
)
_LIBPQ = re.compile(rf"\s*(?:(?:{_LIBPQ_NAMES})\s*=\s*(?:'(?:[^'\\]|\\.)*'|(?:\\.|[^\s\\'])*)\s*)+")
"""libpq's `host=... password='a b'` (PostgreSQL 17, section 32.1.1.1), by its usual keywords."""

_known: dict[str, str] = {}
"""What is replaced, by what: secrets that this process was told."""


def without_password(text: str) -> str:
    """Text with passwords replaced: those that were remembered, and what looks like one.

    >>> without_password("postgresql://me:s3/cret@host/db?sslpassword=x&a=1")
    'postgresql://me:***@host/db?sslpassword=***&a=1'
    >>> without_password("dbname=studies password='a b c'")
    'dbname=studies password=***'
    """
    for secret in sorted(_known, key=len, reverse=True):  # a longer one may hold a shorter one
        text = text.replace(secret, _known[secret])
    text = _USER_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    text = _SPACED_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    return _NAMED_SECRET.sub(rf"\1\2{HIDDEN}", text)


def remember_password(where: str) -> None:
    """Cuts the secrets in a storage's name out of every text from now on.

    Args:
        where: What a user named, or an argument of the command line that holds it; without a
            secret in it nothing happens.
    """
    start = _SCHEME.search(where)
    name = where[start.start() :] if start else where
    secrets = set(_secrets_of_url(name) if start else _secrets_of_libpq(name))
    for secret in secrets:
        for form in _forms(secret):
            if len(form) >= SHORTEST:
                _known[form] = HIDDEN
    if secrets and start:
        for form in _forms(name):
            _known[form] = _shown(name)


def check_readable(where: str) -> None:
    """Refuses the name of a storage of which it cannot be told what is the password.

    Raises:
        StudyError: If it is a URL of a server with an `@` besides the one before its host, of which
            SQLAlchemy takes another part for the password than people do, or in libpq's keywords;
            no password in it is shown.
    """
    if _is_libpq(where):
        raise StudyError(
            f"storage {without_password(where)!r} is in libpq's keywords. Write "
            f"postgresql://user@host/database."
        )
    scheme, _, rest = where.partition("://")
    of_file = not rest or scheme == "journal" or scheme.startswith("sqlite")
    if not of_file and _is_ambiguous(where):
        raise StudyError(
            f"storage {scheme}://{HIDDEN}: only the host may have an @ before it; which part is "
            f"the password cannot be told. Write each other @ as %40, such as "
            f"{scheme}://me:a%40b@host/database."
        )


def _is_libpq(where: str) -> bool:
    return _LIBPQ.fullmatch(where) is not None


def _is_ambiguous(where: str) -> bool:
    rest = where.partition("://")[2]
    user, at, others = rest.partition("@")
    return bool(at) and ("@" in others or "/" in user.partition(":")[0])


def _shown(where: str) -> str:
    """The name of a storage without its secrets."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    scheme = where.partition("://")[0]
    try:
        url = make_url(where)
    except (ArgumentError, ValueError):
        return f"{scheme}://{HIDDEN}"
    if _is_ambiguous(where):
        return f"{scheme}://{HIDDEN}"
    hidden = {name: HIDDEN for name in url.query if _QUERY_NAME.fullmatch(name)}
    text = url.update_query_dict(hidden).render_as_string(hide_password=True)
    return text.replace(quote_plus(HIDDEN), HIDDEN)


def _secrets_of_url(where: str) -> Iterator[str]:
    """The secrets in a URL, by SQLAlchemy's reading and by that of people."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    head, at, _ = where.partition("://")[2].rpartition("@")
    if at and ":" in head:
        by_people = head.partition(":")[2]
        yield by_people
        if _is_ambiguous(where):  # what a driver takes for the host, say, is a piece of it
            yield from re.split(r"[@/?#:&=]", by_people)
    try:
        url = make_url(where)
    except (ArgumentError, ValueError):
        return
    if url.password:
        yield str(url.password)
    for name, value in url.query.items():
        if _QUERY_NAME.fullmatch(name):
            yield from (value,) if isinstance(value, str) else value


def _secrets_of_libpq(where: str) -> Iterator[str]:
    """The secrets in libpq's keywords, by psycopg where that is installed."""
    if not _is_libpq(where):
        return
    for match in _NAMED_SECRET.finditer(where):
        yield match[3].strip("'")
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        return
    try:
        read = conninfo_to_dict(where)
    except ProgrammingError:
        return
    for name, value in read.items():
        if _QUERY_NAME.fullmatch(name) and value is not None:
            yield str(value)


def _forms(secret: str) -> Iterator[str]:
    """A secret as messages may have it: decoded, encoded, quoted, on one line."""
    decoded = {secret, unquote(secret), unquote_plus(secret)}
    plain = set(decoded)
    for text in decoded:
        for safe in ("", "/"):  # as drivers encode it, and as people do
            plain.add(quote(text, safe=safe, errors="surrogatepass"))
            plain.add(quote_plus(text, safe=safe, errors="surrogatepass"))
    plain |= {" ".join(text.split()) for text in plain}
    for text in plain:
        yield text
        yield printable(text)
        yield repr(text)[1:-1]
        yield json.dumps(text)[1:-1]
        yield json.dumps(text, ensure_ascii=False)[1:-1]
