"""Whatever is in a file or a storage, reading it gives what is documented or a clean error, and
runs nothing."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoshard.cli.job_file import Job, parse_job
from autoshard.cost_model.hardware.hardware import Hardware, h100
from autoshard.errors import ArgumentError, AutoshardError, HardwareError, StudyError
from autoshard.evidence.candidate import Candidate, Origin
from autoshard.search.study.claims import Claims, record_of
from autoshard.search.study.journal import Journal
from autoshard.search.study.shared_study import candidates_of
from autoshard.table.spec_table import SpecTable

EXECUTIONS = 400
"""Of each loader in every run, the same ones each time."""

fuzz = settings(max_examples=EXECUTIONS, deadline=None, derandomize=True)
NESTED = "[" * 100_000
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
)
ESCAPES = "\x1b]0;title\x07\x1b[2J../../etc/passwd\u202e"


def changed(whole: Any, draw: Any) -> Any:
    """A valid document with some of it replaced by anything."""
    if draw(st.integers(0, 9)) == 0:
        return draw(values)
    if isinstance(whole, dict):
        return {
            k if draw(st.integers(0, 30)) else draw(st.text()): changed(v, draw)
            for k, v in whole.items()
        }
    if isinstance(whole, list):
        return [changed(v, draw) for v in whole]
    return whole


TRIAL = Candidate("fsdp", Origin.SEARCH, ("a.0->data",), "anchors", "k").to_dict()
HARDWARE = json.loads(h100.to_json())


@fuzz
@given(st.data())
def test_evidence(data: st.DataObject) -> None:
    record = changed({"candidates": [TRIAL], "note": ""}, data.draw)
    try:
        found = candidates_of(json.loads(json.dumps(record)))
    except StudyError:
        return
    assert all(isinstance(candidate, Candidate) for candidate in found.values())


class Stored:
    """A trial as a storage gives it."""

    def __init__(self, attributes: Any) -> None:
        self.user_attrs, self.number = attributes, 0


@fuzz
@given(st.text() | values.map(json.dumps))
@example(NESTED)
def test_records(text: str) -> None:
    try:
        record_of(Stored({"record.0": text, "claim": {"task": ESCAPES}}))  # type: ignore[arg-type]
    except StudyError as error:
        assert "no readable record" in str(error)  # noqa: PT017 - most inputs raise, some do not


@fuzz
@given(st.data())
def test_hardware(data: st.DataObject) -> None:
    text = json.dumps(changed(HARDWARE, data.draw))
    try:
        assert isinstance(Hardware.from_json(text), Hardware)
    except HardwareError:
        return


@fuzz
@given(st.binary() | st.text().map(lambda t: t.encode()))
@example(NESTED.encode())
def test_bytes_that_are_no_hardware(raw: bytes) -> None:
    try:
        Hardware.from_json(raw)
    except HardwareError:
        return


@fuzz
@given(st.binary() | values.map(lambda v: json.dumps(v).encode()))
@example(NESTED.encode())
@example(ESCAPES.encode())
def test_tables(raw: bytes) -> None:
    try:
        SpecTable.loads(raw.decode("utf-8", "replace"))
    except AutoshardError as error:
        assert "\x1b" not in str(error)  # noqa: PT017


LINES = st.sampled_from(
    ["factory", "mesh", "compiled", "pins", "storage", "needs", "lease_s", "odd"]
)
TOML = st.sampled_from(
    ['"a"', "1", "-1", "1e400", "nan", "true", "[]", '["compile"]', "{a = [1]}", "1979-05-27", "["]
)


@fuzz
@given(
    st.text()
    | st.lists(st.tuples(LINES, TOML)).map(lambda rows: "\n".join(f"{k} = {v}" for k, v in rows))
)
@example("x = " + NESTED)
@example(f'factory = "{ESCAPES}"')
def test_job_files(text: str) -> None:
    try:
        assert isinstance(parse_job(text, "autoshard.toml"), Job)
    except ArgumentError as error:
        assert "job file autoshard.toml" in str(error)  # noqa: PT017


@fuzz
@given(lines=st.lists(st.binary() | values.map(lambda v: json.dumps(v).encode())))
def test_journals(lines: list[bytes], tmp_path_factory: Any) -> None:
    path: Path = tmp_path_factory.mktemp("journal") / "x.log"
    path.write_bytes(b"\n".join(lines))
    for record in Journal(path, 1.0).read_logs(0):
        assert isinstance(record["op_code"], int)


@fuzz
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["claim", "heartbeat", "ended", "decided", "record.0"]), values
        )
    )
)
def test_claims(attributes: list[dict[str, Any]]) -> None:
    from optuna.trial import TrialState, create_trial

    states = [TrialState.RUNNING, TrialState.FAIL, TrialState.PRUNED]
    trials = [create_trial(state=states[i % 3], user_attrs=a) for i, a in enumerate(attributes)]
    assert isinstance(Claims.of(trials), Claims)


def test_what_is_read_is_never_executed() -> None:
    """No loader of this package uses pickle, eval or a loader that makes arbitrary objects."""
    root = Path(__file__).parent.parent.parent
    files = [
        p for folder in ("autoshard", "cost_model", "search") for p in (root / folder).rglob("*.py")
    ]
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}, (
                    file
                )
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), file
    assert msgspec.json.decode(b'{"__class__": "os.system"}') == {"__class__": "os.system"}
