"""From a plan to its spec table."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import jax
import msgspec

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.compiler.bound_plan import BoundPlan
from autoshard.evidence.candidate import Candidate, Status
from autoshard.layout.spec import Spec
from autoshard.table.leaf_patterns import likenesses, sorted_by_path
from autoshard.table.schema import ConstraintEntry, Evidence, Leaf, MeshEntry, as_output
from autoshard.table.spec_entry import partition_spec_text, spec_to_entry
from autoshard.table.spec_table import SpecTable
from autoshard.tracing.program import Program, Value
from autoshard.version import own_version


def table_of(plan: BoundPlan) -> SpecTable:
    """The plan as data."""
    program, layout = plan.traced.program, plan.layout
    inputs = _leaves(plan, program.input_paths, program.body.inputs, layout.input_specs())
    for path, group in zip(program.input_paths, layout.problem.groups.of_input, strict=True):
        inputs[path] = msgspec.structs.replace(inputs[path], group=group.value)
    outputs = _leaves(plan, program.output_paths, program.body.outputs, layout.output_specs())
    as_outputs = {path: as_output(leaf) for path, leaf in inputs.items()}

    carried = {program.output_paths[o]: program.input_paths[i] for i, o in plan.carry}
    table = SpecTable(
        function=program.name,
        mesh=MeshEntry(dict(plan.mesh.axes), list(plan.mesh.axis_types)),
        rules=[str(rule) for rule in plan.rules],
        constraints="anchors" if layout.inside else "arguments",
        inputs=inputs,
        outputs=outputs,
        inside=_inside(plan),
        outputs_like=likenesses(outputs, as_outputs, carried),
        evidence=Evidence(program.fingerprint, str(plan.verified), {}),
    )
    # The checksum is of what the plan is, so the evidence that holds it comes last.
    return msgspec.structs.replace(table, evidence=_evidence(plan, table.checksum()))


def _leaves(
    plan: BoundPlan, paths: Sequence[str], values: Sequence[Value], specs: Sequence[Spec]
) -> dict[str, Leaf]:
    """Argument or output leaves in the order of their paths, without groups."""
    logical_axes = plan.layout.problem.logical_axes
    leaves = {}
    for path, value, spec in zip(paths, values, specs, strict=True):
        names = [
            None if logical_axis == NO_AXIS else logical_axes.axes[logical_axis].name
            for logical_axis in logical_axes.of_value[value.index]
        ]
        leaves[path] = Leaf(
            shape=list(value.shape),
            dtype=value.dtype,
            spec=spec_to_entry(spec),
            logical_axes=names,
        )
    return sorted_by_path(leaves)


def _inside(plan: BoundPlan) -> list[ConstraintEntry]:
    """The constraints, equal ones (those of like layers, say) as one entry, in program order."""
    counts = Counter(
        (c.source, c.primitive, c.place, tuple(c.shape), partition_spec_text(c.spec))
        for c in plan.constraints
    )
    return [
        ConstraintEntry(
            source=source,
            primitive=primitive,
            place=place,
            shape=list(shape),
            spec=spec,
            times=times,
        )
        for (source, primitive, place, shape, spec), times in counts.items()
    ]


def _evidence(plan: BoundPlan, checksum: str) -> Evidence:
    program, mesh = plan.traced.program, plan.mesh
    # Predictions alone can be made again, and a search makes thousands.
    candidates = [c for c in plan.candidates if c.status is not Status.PREDICTED]
    return Evidence(
        checksum=checksum,
        fingerprint=program.fingerprint,
        verified=str(plan.verified),
        versions={"autoshard": own_version(), "jax": jax.__version__},
        arguments=arguments_fingerprint(program),
        hardware={
            "platform": mesh.platform,
            "kind": mesh.device_kind,
            "devices": str(mesh.user.devices.size),
        },
        when=plan.when,
        search_s=plan.search_s,
        primitives=primitives_of(program),
        candidates=[_record(candidate) for candidate in candidates],
    )


def _record(candidate: Candidate) -> dict[str, object]:
    """A candidate without what is empty."""
    return {name: value for name, value in candidate.to_dict().items() if value not in ("", None)}


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
