"""A candidate with its evidence: predicted, partitioned, compiled, verified, measured.

A failure is a value with a reason, never an exception.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from autoshard.evidence.collectives import Collective


class Status(enum.StrEnum):
    """How far a candidate came; the first members are of most interest to a reader."""

    WINNER = "winner"
    MEASURED = "measured"
    COMPILED = "compiled"
    PARTITIONED = "partitioned"
    PREDICTED = "predicted"
    REJECTED = "rejected"

    @property
    def rank(self) -> int:
        """Position in the order of the members."""
        return list(Status).index(self)


class Origin(enum.StrEnum):
    """Who proposed a candidate."""

    PRESET = "preset"
    SEARCH = "search"


@dataclass(frozen=True, slots=True)
class Predicted:
    """From the model: seconds, peak bytes per device, bytes one device sends."""

    time_s: float
    peak_bytes: int
    collective_bytes: int


@dataclass(frozen=True, slots=True)
class PartitionedEvidence:
    """From Shardy's passes on the lowered module."""

    collectives: tuple[Collective, ...]
    collective_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledEvidence:
    """From the compiled program, per device.

    Attributes:
        collectives: By kind and mesh axes, loop trip counts included.
        collective_bytes: Bytes one device sends.
        argument_bytes: Arguments (unused ones are not in the program).
        output_bytes: Outputs.
        alias_bytes: Outputs that live in donated arguments.
        temp_bytes: Temporaries.
        peak_bytes: arguments + outputs - aliases + temporaries on CPU, the compiler's own peak
            elsewhere.
        full_remat_warnings: "Involuntary full rematerialization" warnings of the partitioner.
        flops: The compiler's count for one device, loop bodies once; 0 where it gives none.
        time_s: Seconds of a step: alpha-beta seconds of the compiled collectives, and `compute_s`.
        compile_s: Seconds it took to compile.
        compute_s: Seconds of compute in `time_s`.
        compute_from: Provenance of `compute_s`: the model (`predicted`) or the compiler's own
            estimate (`compiler`).
        level: How far the compiler optimised: `quick` is good for memory and a ranking, `full` is
            what would run.
    """

    collectives: tuple[Collective, ...]
    collective_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    full_remat_warnings: int
    flops: float
    time_s: float
    compile_s: float
    compute_s: float = 0.0
    compute_from: Literal["predicted", "compiler"] = "predicted"
    level: Literal["quick", "full"] = "full"


@dataclass(frozen=True, slots=True)
class Verified:
    """Outcome of comparing outputs: the element with the largest error for its own tolerance.

    Attributes:
        max_abs_err: Its absolute difference.
        tolerance: Its tolerance.
        against: `unsharded function`; where the compiler gets that wrong, the function run op by op
            (which is said); or the second layout and the sizes at which the unsharded function ran.
        leaf: Path of its leaf.
    """

    max_abs_err: float
    tolerance: float
    against: str
    leaf: str

    @property
    def in_tolerances(self) -> float:
        """The error in tolerances; more than 1 does not agree."""
        if self.tolerance > 0:
            return self.max_abs_err / self.tolerance
        return math.inf if self.max_abs_err > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Wall time of one call: median over interleaved rounds, and every round."""

    median_s: float
    rounds: int
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate.

    Attributes:
        name: Readable name (`fsdp`, `search-17`).
        origin: Who proposed it.
        preset: Name of the preset; None for one that was searched.
        rules: Axis rules as text, in order.
        constraints: `anchors` (stated inside the function) or `arguments`.
        key: Digest of the effective layout.
        status: How far it came.
        reason: Why it was rejected or not taken further.
        predicted: From the model; None for a layout stated at arguments only, of whose inside the
            partitioner decides.
        partitioned: From Shardy's passes.
        compiled: From the compiled program.
        verified: From a comparison of outputs.
        measured: From a clock.
    """

    name: str
    origin: Origin
    rules: tuple[str, ...]
    constraints: Literal["anchors", "arguments"]
    key: str
    status: Status = Status.PREDICTED
    reason: str = ""
    predicted: Predicted | None = None
    partitioned: PartitionedEvidence | None = None
    compiled: CompiledEvidence | None = None
    verified: Verified | None = None
    measured: Measured | None = None
    preset: str | None = None

    @property
    def is_preset(self) -> bool:
        """True for a layout that experts use, with constraints inside or not."""
        return self.origin is Origin.PRESET

    @property
    def rejected(self) -> bool:
        """True for one that is out of the search, for a `reason`."""
        return self.status is Status.REJECTED

    def named_as(self, other: Candidate) -> Candidate:
        """This candidate under the name and with the prediction that another of its layout has."""
        return replace(
            self,
            name=other.name,
            origin=other.origin,
            preset=other.preset,
            rules=other.rules,
            predicted=other.predicted,
        )

    def reject(self, reason: str) -> Candidate:
        """This candidate, rejected."""
        return replace(self, status=Status.REJECTED, reason=reason)

    def to_dict(self) -> dict[str, Any]:
        """Plain builtins, for JSON."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result


def winner_of(candidates: Iterable[Candidate]) -> Candidate | None:
    """The candidate that won; None among candidates of no search."""
    return next((c for c in candidates if c.status is Status.WINNER), None)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A preset that makes no sense for a function, and why."""

    name: str
    reason: str
