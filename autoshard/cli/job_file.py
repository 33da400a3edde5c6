"""A job: what to search for and with what effort, from a TOML file or from options of the command
line.

    factory = "train.py:factory"
    mesh = "data=4,model=2"
    storage = "journal:/shared/study.log"
    compiled = 64
    [pins]
    "params/wq" = ["", "model"]
    "re:.*/bias" = { only = ["data"] }

Instead of a factory, `[variants]` names one for each way to write the same step (`remat =
"train.py:remat"`): all are searched. A pin is a list with one entry a dimension: `""` for
unsharded, a mesh axis, or a list of mesh axes; with `only`, the mesh axes that may split the
dimension (`"*"`: any), and the search decides. `re:` begins a pattern of leaf paths. Nothing read
from a job file is executed; factories are imported as if they stood on the command line, from the
same places.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import PartitionSpec

from autoshard._optimize import optimize
from autoshard.cli.factory import call_factory
from autoshard.errors import ArgumentError
from autoshard.evaluate.effort import Effort
from autoshard.layout.pins import Only
from autoshard.plan import Plan
from autoshard.search.study.lease_watch import LEASE_S
from autoshard.search.study.passwords import without_password
from autoshard.search.study.shared_study import Sharing
from autoshard.search.study.task_queue import CAPABILITIES, Capability
from autoshard.text import shown

MAX_BYTES = 2**20
"""Of a job file: one is a page long, and another file named by mistake is not read. Without it
test_what_is_read_is_bounded fails."""

PATTERN = "re:"
"""Begins a pattern of leaf paths."""

ANY = "*"
"""Any mesh axis may split the dimension."""

Entries = list[str | list[str]]


class OnlyPin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `autoshard.Only` in a job file."""

    only: Entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to search for. What is None is left to the factory, else to `optimize`.

    Attributes:
        factory: See `autoshard.cli.factory`.
        variants: Instead of it, factories by name of functions that compute the same in other ways.
        samples_per_step: Of each variant, where they differ; the time of one sample is compared.
        mesh: Such as `data=4,model=2`.
        target: Hardware that is not here, such as `tpu:v5e:4x4`.
        cpu_devices: Work on this many CPU devices.
        distributed: Search together with other processes (`jax.distributed`): `auto`, or
            `HOST:PORT,COUNT,NUMBER`.
        memory_budget: Per device, such as `16GiB`.
        hardware: A preset, or a file written by calibration.
        compiled: Candidates to compile, by all workers together.
        measured: Candidates to measure.
        full: On a target, candidates to compile at the full level.
        seconds: Start nothing new after this long.
        seed: Of the sampler.
        pins: Leaf paths, or patterns of them, to specs.
        isolate: Compile in a process of its own.
        compile_timeout_s: Until a compilation has failed.
        compile_memory: For the compiler's process, such as `16GiB`.
        storage: Where the study is kept.
        study: Its name.
        lease_s: A worker that shows no life for this long has lost its task.
        run_timeout_s: Until verifying or measuring a candidate has failed, and its worker ends.
        needs: What this worker is needed for: the capabilities of `task_queue`, in the users' word.
        compilation_cache: jax's cache of compiled programs; may be shared.
        out: Where to save the spec table.
    """

    factory: str = ""
    variants: Mapping[str, str] = field(default_factory=dict)
    samples_per_step: float | Mapping[str, float] | None = None
    mesh: str | None = None
    target: str | None = None
    cpu_devices: int | None = None
    distributed: str | None = None
    memory_budget: int | str | None = None
    hardware: str | None = None
    compiled: int | None = None
    measured: int | None = None
    full: int | None = None
    seconds: float | None = None
    seed: int = 0
    pins: Mapping[str, Entries | OnlyPin] = field(default_factory=dict)
    isolate: bool | None = None
    compile_timeout_s: float | None = None
    compile_memory: int | str | None = None
    storage: str | None = None
    study: str | None = None
    lease_s: float = LEASE_S
    run_timeout_s: float | None = None
    needs: tuple[Capability, ...] = CAPABILITIES
    compilation_cache: str | None = None
    out: str | None = None

    def updated(self, options: Mapping[str, Any]) -> Job:
        """This job with the options that were given (are not None)."""
        return replace(
            self, **{name: value for name, value in options.items() if value is not None}
        )

    @property
    def effort(self) -> Effort:
        """How many candidates are compiled and measured."""
        plain = Effort()
        compiled = plain.compiled if self.compiled is None else self.compiled
        measured = plain.measured if self.measured is None else self.measured
        full = plain.full if self.full is None else self.full
        return Effort(compiled, min(measured, compiled), self.seconds, full)


def read_job(what: str, options: Mapping[str, Any]) -> Job:
    """A job from a TOML file, or for a factory, with the options of the command line on top.

    Args:
        what: Path of a job file (it ends in `.toml`), or a factory.
        options: Fields of `Job`; None where an option was not given.

    Raises:
        ArgumentError: If the file cannot be read, or is no job; it says where.
    """
    if not what.endswith(".toml"):
        return Job(factory=what).updated(options)
    path = Path(what)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ArgumentError(
                f"job file {what}: larger than {MAX_BYTES} bytes; that is no job file."
            )
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(f"job file {what!r} cannot be read: {reason}.") from None
    return parse_job(text, what).updated(options)


def parse_job(text: str, where: str) -> Job:
    """A job from TOML.

    Raises:
        ArgumentError: If it is none; the message names the field.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is the former
        raise ArgumentError(
            f"job file {where}: no TOML: {shown(error) or 'nested too deeply'}."
        ) from None
    names = [field.name for field in fields(Job)]
    unknown = sorted(set(document) - set(names))
    if unknown:
        raise ArgumentError(
            f"job file {where}: unknown field {shown(unknown[0])!r}. It may have "
            f"{', '.join(names)}."
        )
    if ("factory" in document) == ("variants" in document):
        raise ArgumentError(f"job file {where}: it must have either a factory or variants.")
    try:
        return msgspec.convert(document, Job)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ArgumentError(f"job file {where}: {shown(without_password(str(error)))}.") from None


def arguments_of(job: Job) -> dict[str, Any]:
    """The arguments of `optimize`: those of the factory, with what the job says on top.

    Raises:
        FactoryError: If the factory fails.
        ArgumentError: If there is no mesh.
    """
    arguments = _arguments_of_variants(job.variants) if job.variants else call_factory(job.factory)
    pins = {_leaves(leaves): _pin(pin) for leaves, pin in job.pins.items()}
    chosen: dict[str, Any] = {
        "mesh": job.mesh,
        "target": job.target,
        "memory_budget_bytes": job.memory_budget,
        "hardware": job.hardware,
        "storage": job.storage,
        "study": job.study,
        "isolate": job.isolate,
        "compile_timeout_s": job.compile_timeout_s,
        "compile_memory_bytes": job.compile_memory,
        "pins": pins or None,
        "samples_per_step": job.samples_per_step,
    }
    arguments |= {name: value for name, value in chosen.items() if value is not None}
    if "mesh" not in arguments:
        raise ArgumentError(
            "no mesh: pass --mesh, such as --mesh data=4,model=2, or let the factory give one."
        )
    efforts = (job.compiled, job.measured, job.full, job.seconds)
    if "effort" not in arguments or any(effort is not None for effort in efforts):
        arguments["effort"] = job.effort
    return arguments | {"seed": job.seed}


def _leaves(leaves: str) -> str | re.Pattern[str]:
    """A leaf path, or the pattern of several."""
    if not leaves.startswith(PATTERN):
        return leaves
    try:
        return re.compile(leaves.removeprefix(PATTERN))
    except re.error as error:
        raise ArgumentError(
            f"pin {leaves!r}: no regular expression: {error}. Write it as in Python, such as "
            f"'re:.*/bias'."
        ) from None


def _pin(pin: Entries | OnlyPin) -> PartitionSpec | Only:
    if not isinstance(pin, OnlyPin):
        return PartitionSpec(*map(_entry, pin))
    allowed: list[Any] = []
    for entry in pin.only:
        allowed.append(PartitionSpec.UNCONSTRAINED if entry == ANY else _entry(entry))
    return Only(*allowed)


def _entry(entry: str | list[str]) -> str | tuple[str, ...] | None:
    """One dimension of a PartitionSpec."""
    return tuple(entry) if isinstance(entry, list) else entry or None


def _arguments_of_variants(factories: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `optimize` for several functions; but for these and their arguments,
    factories must agree.

    Raises:
        FactoryError: If a factory fails.
        ArgumentError: If they do not agree.
    """
    variants: dict[str, Any] = {}
    common: dict[str, Any] = {}
    for name, factory in factories.items():
        rest = call_factory(factory)
        variants[name] = rest.pop("fn"), rest.pop("example_args")
        if len(variants) > 1 and rest != common:
            differs = [key for key in {*rest, *common} if rest.get(key) != common.get(key)]
            raise ArgumentError(
                f"variant {name!r}: {factory} gives another {', '.join(sorted(differs))} than "
                f"{next(iter(factories))!r}; variants share all arguments but fn and example_args."
            )
        common = rest
    return {**common, "fn": None, "example_args": None, "variants": variants}


def run_job(job: Job, *, again: bool = False, progress: bool = True) -> Plan:
    """Searches as a job says.

    Args:
        job: The job.
        again: Measure once more what was measured before.
        progress: Say what is being done.

    Raises:
        AutoshardError: As `optimize` does.
    """
    arguments = arguments_of(job)
    sharing = Sharing(job.needs, job.lease_s, again=again, run_limit_s=job.run_timeout_s)
    try:
        plan = optimize(**arguments, sharing=sharing, progress=progress)
    except TypeError as error:
        if "unexpected keyword argument" in str(error) and "optimize" in str(error):
            raise ArgumentError(
                f"{job.factory or dict(job.variants)}: the factory gives what optimize does not "
                f"take: {error}"
            ) from None
        raise
    if job.out is not None and jax.process_index() == 0:
        plan.table.save(job.out)
    return plan
