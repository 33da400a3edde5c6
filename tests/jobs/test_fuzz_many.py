"""A million damaged files: every loader gives what is documented, or its own clean error."""

from __future__ import annotations

import functools
import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from autoshard.cli.job_file import Job, parse_job, read_job
from autoshard.compiler.cache import MAX_FILE_BYTES as MAX_CACHE_BYTES
from autoshard.compiler.cache import CompileCache, Refusal, Stored
from autoshard.cost_model.hardware.hardware import Hardware, h100
from autoshard.errors import ArgumentError, AutoshardError, HardwareError, StudyError, TableError
from autoshard.search.study.claims import CLAIM, Claim, Claims, record_attributes
from autoshard.search.study.journal import Journal
from autoshard.search.study.task_id import TaskId, TaskKind
from autoshard.table.spec_table import SpecTable, candidates_of

GOLDEN = Path(__file__).parents[1] / "golden" / "tables"
MANY = {"tables": 300_000, "table files": 100_000, "job files": 200_000, "hardware files": 200_000, "journals": 100_000, "caches": 100_000}  # fmt: skip
"""A million in all; the slow ones fewer."""
FEW = 300

JOB = """factory = "train.py:factory"
mesh = "data=4,model=2"
storage = "journal:/shared/study.log"
compiled = 64
seconds = 1.5
needs = ["compile", "measure"]
[pins]
"params/wq" = ["", "model"]
"re:.*/bias" = { only = ["data", ["x", "*"]] }
"""
TOKENS = [
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"0", b"-1", b"1e400", b"1e-400", b"9" * 30, b"9" * 5000, b"NaN",
    b"\\ud800", b"\\u0000", b"\x00", b"\xff", b"\xed\xa0\x80", b"\n", b"'", b"\\", b"*", b"0-999999999", b"2147483648", b"[" * 300, b'{"a":' * 300,
    b"\x1b[31m", b"=", b"[[", b"#", b'""', b"P(print(1))", b'"spec"', b'"each"', b'"op_code"', b'"a" = 1\n', b"1979-05-27",
]  # fmt: skip


@dataclass(frozen=True)
class Loader:
    """What is damaged, how it is read, and the errors that its documentation names."""

    samples: list[bytes]
    load: Callable[[bytes, Path], object]
    errors: tuple[type[Exception], ...]


def table(data: bytes, _: Path) -> object:
    loaded = SpecTable.loads(data.decode("utf-8", "replace"), "step.json")
    candidates_of(loaded)
    return loaded


def table_file(data: bytes, folder: Path) -> object:
    (folder / "step.json").write_bytes(data)
    return SpecTable.load(folder / "step.json")


def job(data: bytes, _: Path) -> object:
    return parse_job(data.decode("utf-8", "replace"), "autoshard.toml")


def hardware(data: bytes, _: Path) -> object:
    return Hardware.from_json(data)


def journal(data: bytes, folder: Path) -> object:
    path = folder / "study.log"
    path.write_bytes(data)
    storage = JournalStorage(Journal(path, 1.0, read_only=True))
    studies = storage.get_all_studies()
    return [Claims.of(storage.get_all_trials(study._study_id)) for study in studies]


@functools.cache
def journal_of_a_study() -> bytes:
    """What three workers wrote: claims, a record, a rejected candidate, a task that was released."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.log"
        storage = JournalStorage(Journal(path, 1.0))
        study = storage.create_new_study([StudyDirection.MINIMIZE], "s")
        for number in range(4):
            claim = Claim(
                TaskId(TaskKind.COMPILE, (str(number),)), "t", "host:1", f"n{number}", 5.0
            )
            attributes: dict[str, Any] = {CLAIM: claim.attribute()}
            template = create_trial(state=TrialState.RUNNING, user_attrs=attributes)
            trial = storage.create_new_trial(study, template)
            storage.set_trial_user_attr(trial, "heartbeat", number)
            for name, text in record_attributes(claim, {"number": number}).items():
                storage.set_trial_user_attr(trial, name, text)
            state = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL][number % 3]
            values = [1.0] if state == TrialState.COMPLETE else None
            storage.set_trial_state_values(trial, state, values)
        return path.read_bytes()


KEY = "ab" * 32


def cache(data: bytes, folder: Path) -> object:
    path = folder / "compiled" / KEY[:2] / f"{KEY}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return CompileCache(folder).get(KEY)


SMALL = json.dumps(
    {
        "schema": 3, "function": "f", "mesh": {"axes": {"data": 4}, "types": ["auto"]}, "rules": ["w.1->data"], "constraints": "anchors",
        "inputs": {"p/l/*/w": {"spec": [None, "data"], "text": "P(None, 'data')", "shape": [8, 8], "dtype": "float32", "logical_axes": ["a", None], "each": ["0-3"]}},
        "outputs": {"out/1": {"spec": [], "shape": [], "dtype": "float32"}}, "outputs_like": {"out/0": "p"},
        "inside": [{"source": "a.py:1", "primitive": "dot", "place": "result", "shape": [8], "spec": "P('data')"}],
        "evidence": {"fingerprint": "f", "verified": "no (x)", "versions": {"jax": "1"}, "candidates": [
            {"name": "a", "origin": "preset", "rules": [], "constraints": "anchors", "key": "k", "status": "winner", "measured": {"median_s": 0.1, "rounds": 3}}]},
    }
).encode()  # fmt: skip
LOADERS = {
    "tables": Loader([SMALL, (GOLDEN / "mlp_schema_1.json").read_bytes(), (GOLDEN / "mlp_schema_2.json").read_bytes()], table, (TableError,)),
    "table files": Loader([SMALL], table_file, (TableError,)),
    "job files": Loader([JOB.encode()], job, (ArgumentError,)),
    "hardware files": Loader([h100.to_json().encode()], hardware, (HardwareError,)),
    "journals": Loader([journal_of_a_study()], journal, (StudyError,)),
    "caches": Loader([msgspec.json.encode(Stored(refusal=Refusal(5, 3)))], cache, ()),
}  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Some bytes cut, repeated, moved, changed, or replaced by what parsers mind."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, end = sorted(chance.randrange(len(result) + 1) for _ in range(2))
        end = min(end, at + chance.choice([1, 4, 30, 400]))
        how = chance.randrange(6)
        if how == 0:
            del result[at:end]
        elif how == 1:
            result[at:at] = result[at:end]
        elif how == 2 and at < len(result):
            result[at] ^= 1 << chance.randrange(8)
        elif how == 3:
            result[at : at + chance.randrange(3)] = chance.choice(TOKENS)
        elif how == 4:
            piece = result[at:end]
            del result[at:end]
            to = chance.randrange(len(result) + 1)
            result[to:to] = piece
        else:
            words = [i for i in range(len(result)) if result[i] in b'"[{,:=']
            if words:
                result[chance.choice(words)] = chance.choice(b'"[]{},:= 0')
    return bytes(result)


def run(name: str, count: int, folder: Path) -> tuple[int, int]:
    """Loads so many damaged files; (how many were read, how many were refused)."""
    loader, chance = LOADERS[name], random.Random(f"{name} 19")
    read = refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ExperimentalWarning)
        for number in range(count):
            data = damaged(chance.choice(loader.samples), chance)
            said = ""
            try:
                loader.load(data, folder)
                read += 1
            except loader.errors as error:
                refused += 1
                said = str(error)
            except BaseException:
                print(f"{name}, number {number}: {data!r}")
                raise
            assert len(said) < 5000, said
            assert said.isprintable() or name not in ("tables", "table files"), said
    return read, refused


@pytest.mark.parametrize("name", LOADERS)
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    assert sum(run(name, FEW, tmp_path)) == FEW


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_a_million_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    count = MANY[name]
    start_s = time.monotonic()
    read, refused = run(name, count, tmp_path)
    seconds = time.monotonic() - start_s
    print(f"{name}: {read + refused} loads, {read} read, {refused} refused, {seconds:.0f} s")
    assert read + refused == count


def test_what_is_read_is_bounded(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    with large.open("wb") as file:
        file.truncate(2**21)
    for where in (str(large), "/dev/zero"):
        with pytest.raises(HardwareError, match="larger than 1048576 bytes"):
            Hardware.load(where)
        with pytest.raises(TableError, match=r"larger than|is no JSON"):
            SpecTable.load(where)
    endless = tmp_path / "endless.toml"
    endless.symlink_to("/dev/zero")
    for where in (large, endless):
        with pytest.raises(ArgumentError, match="larger than 1048576 bytes"):
            read_job(str(where), {})
    cached = tmp_path / "compiled" / KEY[:2] / f"{KEY}.json"
    cached.parent.mkdir(parents=True)
    text = msgspec.json.encode(Stored(refusal=Refusal(5, 3)))
    cached.write_bytes(text)
    assert CompileCache(tmp_path).get(KEY) is not None
    cached.write_bytes(text + b" " * MAX_CACHE_BYTES)
    assert CompileCache(tmp_path).get(KEY) is None


@pytest.mark.parametrize("number", ["-1", "1e31", "1e400", "9" * 400])
def test_numbers_that_cannot_be_are_refused(number: str) -> None:
    text = SMALL.decode().replace("0.1", number)
    with pytest.raises(AutoshardError, match=r"not between 0 and|no spec table|that is none"):
        candidates_of(SpecTable.loads(text))


def test_a_job_is_what_the_sample_says() -> None:
    assert isinstance(parse_job(JOB, "autoshard.toml"), Job)
