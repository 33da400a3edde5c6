"""From a plan to its spec table."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import msgspec

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.compiler.bound_plan import BoundPlan
from autoshard.evidence.candidate import Status
from autoshard.layout.spec import Spec
from autoshard.table.leaf_patterns import likenesses
from autoshard.table.spec_table import (
    ConstraintEntry,
    Evidence,
    Leaf,
    MeshEntry,
    SpecTable,
    by_path,
    spec_to_entry,
)
from autoshard.tracing.program import Program, Value
from autoshard.version import own_version


def table_of(plan: BoundPlan) -> SpecTable:
    """The plan as data."""
    program, layout = plan.traced.program, plan.layout
    names = [logical_axis.name for logical_axis in layout.problem.logical_axes.axes]
    groups = [group.value for group in layout.problem.groups.of_input]

    def leaves(
        paths: Sequence[str], values: Sequence[Value], specs: Sequence[Spec], groups: Sequence[str]
    ) -> dict[str, Leaf]:
        found = {}
        for path, value, spec, group in zip(paths, values, specs, groups, strict=True):
            logical_axes = [
                None if r == NO_AXIS else names[r]
                for r in layout.problem.logical_axes.of_value[value.index]
            ]
            found[path] = Leaf(
                list(value.shape), value.dtype, spec_to_entry(spec), logical_axes, group
            )
        return by_path(found)

    outputs = program.body.outputs
    inputs_by_path = leaves(program.input_paths, program.body.inputs, layout.input_specs(), groups)
    outputs_by_path = leaves(
        program.output_paths, outputs, layout.output_specs(), [""] * len(outputs)
    )
    plain = {path: msgspec.structs.replace(leaf, group="") for path, leaf in inputs_by_path.items()}
    carried = {program.output_paths[o]: program.input_paths[i] for i, o in plan.carry}
    table = SpecTable(
        function=program.name,
        mesh=MeshEntry(dict(plan.mesh.axes), list(plan.mesh.axis_types)),
        rules=[str(rule) for rule in plan.rules],
        constraints="anchors" if layout.inside else "arguments",
        inputs=inputs_by_path,
        outputs=outputs_by_path,
        inside=_inside(plan),
        outputs_like=likenesses(outputs_by_path, plain, carried),
        evidence=Evidence(program.fingerprint, str(plan.verified), {}),
    )
    return msgspec.structs.replace(table, evidence=_evidence(plan, table.checksum()))


def _inside(plan: BoundPlan) -> list[ConstraintEntry]:
    """The constraints, equal ones (those of like layers, say) as one entry, by first appearance."""
    counts = Counter(
        (c.source, c.primitive, c.place, tuple(c.shape), spec_as_text(c.spec))
        for c in plan.constraints
    )
    return [
        ConstraintEntry(s, p, place, list(shape), spec, n)
        for (s, p, place, shape, spec), n in counts.items()
    ]


def _evidence(plan: BoundPlan, checksum: str) -> Evidence:
    program = plan.traced.program
    return Evidence(
        checksum=checksum,
        fingerprint=program.fingerprint,
        verified=str(plan.verified),
        versions={"autoshard": own_version(), "jax": jax.__version__},
        arguments=arguments_fingerprint(program),
        hardware={
            "platform": plan.mesh.platform, "kind": plan.mesh.device_kind, "devices": str(plan.mesh.user.devices.size),
        },
        when=plan.when,
        search_s=plan.search_s,
        primitives=primitives_of(program),
        candidates=[_record(candidate.to_dict()) for candidate in plan.candidates if candidate.status is not Status.PREDICTED],
    )  # fmt: skip


def _record(candidate: dict[str, Any]) -> dict[str, Any]:
    """A candidate without what is empty."""
    return {name: value for name, value in candidate.items() if value not in ("", None)}


def arguments_fingerprint(program: Program) -> str:
    """Digest of the leaf paths, shapes and dtypes of the arguments."""
    rows = [
        f"{path} {value.dtype}{list(value.shape)}"
        for path, value in zip(program.input_paths, program.body.inputs, strict=True)
    ]
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=12).hexdigest()


def primitives_of(program: Program) -> dict[str, int]:
    """How often each primitive occurs, bodies counted once."""
    return dict(sorted(Counter(eqn.primitive for eqn in program.eqns).items()))


def spec_as_text(spec: Any) -> str:
    """A PartitionSpec as people write it, UNCONSTRAINED included; the same on every jax."""
    free = type(spec).UNCONSTRAINED
    return f"P({', '.join('P.UNCONSTRAINED' if entry is free else repr(entry) for entry in spec)})"
