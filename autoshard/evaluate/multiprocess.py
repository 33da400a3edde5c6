"""A search by all processes of a mesh (`jax.distributed`): the first one leads, the others follow.

Every process makes the same call of `optimize`. Each traces the function; that all of them were
given the same one, the same mesh and the same values is made sure of first. Then the leader alone
proposes, ranks, partitions and keeps the study. What is done on the devices (`DeviceRunner`) is
done by all: the leader says what the next operation is, and a layout is only taken on if it
compiled, ran and gave the right numbers on every process; of a time, the slowest process's counts.
In the end the leader tells the others what came of it, so that all return the same plan, or raise
the same error.
"""

from __future__ import annotations

import _thread
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from autoshard import errors
from autoshard.compiler.compile import Built, Compiled
from autoshard.compiler.transfer import whole
from autoshard.errors import AutoshardError, MeshError, ProcessesError
from autoshard.evaluate.device_runner import Arbitrated, Compared, DeviceRunner
from autoshard.evidence.candidate import Candidate, Measured, Skipped
from autoshard.evidence.throughput import Throughput
from autoshard.evidence.timings import Timings
from autoshard.jax_internals import coordination
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.mesh import MeshInfo
from autoshard.layout.prepare import Prepared
from autoshard.processes.interrupts import Interrupts
from autoshard.processes.process_group import GroupEnded, ProcessGroup
from autoshard.tracing.signature import Call

log = logging.getLogger("autoshard.jobs")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a search, for all processes.

    Attributes:
        key: Of the winner.
        rules: Its axis rules.
        inside: Whether it states them inside the function too.
        verified: Whether its outputs were compared.
        reason: With what, or why not.
        candidates: Every candidate.
        skipped: Presets that make no sense.
        notes: As of the plan, and so are the rest.
        advice: Changes of the program that would gain more.
        bound: How much faster any layout could be.
        throughput: Of the plan, predicted.
        when: Date and time of the end.
        search_s: How long it took.
        timings: Where that went.
    """

    key: str
    rules: tuple[AxisRule, ...]
    inside: bool
    verified: bool
    reason: str
    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    bound: str
    throughput: Throughput
    when: str
    search_s: float
    timings: Timings


@contextmanager
def joined(mesh: MeshInfo, limit_s: float, interrupts: Interrupts) -> Iterator[ProcessGroup | None]:
    """The group of the processes whose devices are in the mesh; None where that is this process
    alone.

    Args:
        mesh: Of the search.
        limit_s: How long another process is waited for.
        interrupts: Of this process; also interrupted if another process is.

    Raises:
        MeshError: If none of the devices is this process's.
        ProcessesError: If the processes do not agree, or one of them fails or does not answer.
    """
    if mesh.target is not None or mesh.processes == (jax.process_index(),):
        yield None
        return
    own, members = jax.process_index(), mesh.processes
    if own not in members:
        raise MeshError(
            f"the mesh has devices of processes {list(members)} only, and this is process {own}. "
            f"Call optimize in those processes, or give it a mesh over all devices."
        )
    store = coordination.coordination()
    if store is None:
        raise MeshError(
            f"the mesh has devices of processes {list(members)}, which jax.distributed.initialize "
            f"has not connected. Call it in each of them before anything else."
        )
    try:
        process_group = ProcessGroup(
            store, own, members, limit_s=limit_s, on_interrupt=_thread.interrupt_main
        )
        with process_group:
            try:
                yield process_group
            except AutoshardError as error:
                if process_group.leads:
                    process_group.last_command("failed", kind=type(error).__name__, text=str(error))
                raise
    except GroupEnded as ended:
        raise ProcessesError(
            f"process {own} of {list(members)}: {ended}. All processes must make the same call. "
            f"With a storage, what was recorded is kept, and the same call goes on from there."
        ) from None


def identity_of_values(call: Call) -> str:
    """A checksum of the argument values of which every process has the whole."""
    checksum = 0
    for leaf in call.leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                continue
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            leaf = whole(leaf)
        host = np.ascontiguousarray(leaf)
        if host.size and host.dtype.itemsize:
            checksum = zlib.crc32(host.view(np.uint8).reshape(-1).data, checksum)
    return f"{checksum:08x}"


@dataclass(eq=False)
class MultiProcessRunner(DeviceRunner):
    """The devices of all processes; for the leader. Its methods tell the followers, and do it here
    as well.
    """

    process_group: ProcessGroup = field(kw_only=True)
    interrupts: Interrupts = field(kw_only=True)
    _forgotten: list[str] = field(default_factory=list)

    @contextmanager
    def _step(self, what: str, **arguments: Any) -> Iterator[None]:
        with self.interrupts.held(), self.process_group.operation(on_devices=what in ON_DEVICES):
            self.process_group.command(what, forget=self._forgotten, **arguments)
            self._forgotten = []
            yield

    def forget(self, key: str) -> None:
        """Drops what was compiled."""
        super().forget(key)
        self._forgotten.append(key)

    def compile(
        self,
        key: str,
        layout: Layout,
        built: Built | None,
        time_of: Callable[[Sequence[Any]], float] | None,
    ) -> Compiled:
        """Compiles a layout on all processes; see `DeviceRunner`."""
        with self._step("compile", key=key, rules=_plain(layout.rules), inside=layout.inside):
            self.process_group.run_on_all(
                lambda: _done(DeviceRunner.compile(self, key, layout, built, time_of))
            )
        return self.compiled[key]

    def set_reference(self, other: str | None, name: str) -> str:
        """Runs what is compared with; see `DeviceRunner`."""
        with self._step("set_reference", other=other, other_name=name):
            findings = self.process_group.run_on_all(
                lambda: DeviceRunner.set_reference(self, other, name)
            )
        return str(findings[0])

    def compare(self, key: str) -> Compared:
        """Compares on each process what it has of the outputs; see `DeviceRunner`."""
        with self._step("compare", key=key):
            return _worst(
                self.process_group.run_on_all(lambda: _plain(DeviceRunner.compare(self, key)))
            )

    def arbitrate(self, key: str, layout: Layout, compared: Compared) -> Arbitrated:
        """A third opinion, the same on all processes; see `DeviceRunner`."""
        with self._step(
            "arbitrate",
            key=key,
            rules=_plain(layout.rules),
            inside=layout.inside,
            compared=_plain(compared),
        ):
            answers = msgspec.convert(
                self.process_group.run_on_all(
                    lambda: _plain(DeviceRunner.arbitrate(self, key, layout, compared))
                ),
                list[Arbitrated],
            )
        return replace(answers[0], compared=_worst([_plain(one.compared) for one in answers]))

    def compare_small(self, layout: Layout) -> tuple[Compared, int] | str:
        """The same at smaller sizes; see `DeviceRunner`."""
        with self._step("compare_small", rules=_plain(layout.rules), inside=layout.inside):
            answers = self.process_group.run_on_all(
                lambda: _plain(DeviceRunner.compare_small(self, layout))
            )
        for answer in answers:
            if isinstance(answer, str):
                return answer
        _, factor = answers[0]
        return _worst([compared for compared, _ in answers]), factor

    def measure(
        self,
        keys: Mapping[str, str],
        keep_inputs: bool,
        late: Callable[[], bool],
        on_round: Callable[[int, Mapping[str, float]], None] | None,
    ) -> dict[str, Measured]:
        """Times layouts on all processes; see `DeviceRunner`."""
        with self._step("measure", keys=dict(keys), keep_inputs=keep_inputs):
            return DeviceRunner.measure(self, keys, keep_inputs, late, on_round)


ON_DEVICES = frozenset({"set_reference", "compare", "arbitrate", "compare_small", "measure"})


def follow(process_group: ProcessGroup, runner: DeviceRunner, interrupts: Interrupts) -> Outcome:
    """Does what the leader says, until it tells what came of the search.

    Raises:
        AutoshardError: The leader's.
        GroupEnded: If the leader ended otherwise.
    """
    with interrupts.held():
        while True:
            name, arguments = process_group.next_command(lambda: interrupts.seen)
            if name == "outcome":
                return msgspec.convert(arguments, Outcome)
            if name == "failed":
                kind = getattr(errors, arguments["kind"], None)
                if isinstance(kind, type) and issubclass(kind, AutoshardError):
                    raise kind(arguments["text"])
                raise GroupEnded(f"process {process_group.members[0]} failed ({arguments['text']})")
            for key in arguments.pop("forget"):
                runner.forget(key)
            try:
                with process_group.operation(on_devices=name in ON_DEVICES):
                    _follow_step(process_group, runner, name, arguments)
            except Exception as error:
                # the leader knows as well: of a layout, what failed on one process failed on all
                log.info("%s: %s", name, error)


def _follow_step(
    process_group: ProcessGroup, runner: DeviceRunner, name: str, arguments: dict[str, Any]
) -> None:
    problem = runner.prepared.problem

    def layout() -> Layout:
        return Layout(
            problem, msgspec.convert(arguments["rules"], tuple[AxisRule, ...]), arguments["inside"]
        )

    if name == "compile":
        process_group.run_on_all(
            lambda: _done(runner.compile(arguments["key"], layout(), None, None))
        )
    elif name == "set_reference":
        process_group.run_on_all(
            lambda: runner.set_reference(arguments["other"], arguments["other_name"])
        )
    elif name == "compare":
        process_group.run_on_all(lambda: _plain(runner.compare(arguments["key"])))
    elif name == "arbitrate":
        compared = msgspec.convert(arguments["compared"], Compared)
        process_group.run_on_all(
            lambda: _plain(runner.arbitrate(arguments["key"], layout(), compared))
        )
    elif name == "compare_small":
        process_group.run_on_all(lambda: _plain(runner.compare_small(layout())))
    elif name == "measure":
        runner.measure(arguments["keys"], arguments["keep_inputs"], lambda: False, None)
    else:
        raise AssertionError(name)


def _done(compiled: Compiled) -> None:
    """What other processes are told of a compiled program: that there is one."""


def _plain(answer: Any) -> Any:
    """An answer as plain builtins, to be sent."""
    return msgspec.to_builtins(answer)


def _worst(answers: Sequence[Any]) -> Compared:
    """Of what each process says of its part of the outputs, what is farthest off; all must
    agree.
    """
    compared = msgspec.convert(list(answers), list[Compared])
    worst = max(compared, key=lambda one: one.verified.in_tolerances)
    return Compared(worst.verified, all(one.agrees for one in compared))


def identity_of(prepared: Prepared, identity: Mapping[str, str]) -> dict[str, str]:
    """What must be the same on all processes."""
    devices = ",".join(str(device.id) for device in prepared.request.mesh.user.devices.flat)
    logical_axes = zlib.crc32(
        " ".join(logical_axis.name for logical_axis in prepared.problem.logical_axes.axes).encode()
    )
    return {
        **identity,
        "order of devices": devices,
        "names of logical axes": f"{logical_axes:08x}",
        "values of arguments": identity_of_values(prepared.traced.call),
    }
