"""Presets: the layouts experts use, as short rule lists over the *discovered* logical axes.

Nothing here looks at names. The batch is the axis that data arguments bring and no parameter has;
the residual axis is the parameter axis that most parameter bytes have (FSDP's usual choice); the
inner axes (heads, mlp, vocabulary) are the other parameter axes, picked greedily until every large
parameter is covered (Megatron's pairing: column split, then row split, because both weights share
the inner axis). In a network of one block the hidden axis is the one that most bytes have; of the
two readings the one whose tensor parallelism sends fewer bytes is taken.

References:
    zero1, fsdp: Rajbhandari et al. (2020), ZeRO, stages 1 and 3.
    tp: Shoeybi et al. (2019), Megatron-LM, section 3.
    tp+sequence: Korthikanti et al. (2022), Reducing Activation Recomputation, section 4.2.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.axes.argument_groups import Group
from autoshard.axes.axis_classes import NO_AXIS
from autoshard.axes.sharding_rules import FactorKind
from autoshard.evidence.candidate import Skipped
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER, AxisRule, Scope
from autoshard.layout.problem import Problem
from autoshard.search.axis_sizes import activation_bytes, dividing_mesh_axes
from autoshard.tracing.program import Value

LARGE = 0.01
"""Tensor parallelism splits weights that hold at least this share of all parameter bytes.

Chosen by hand, to leave scales of norms whole: without it (0)
`test_megatron_pairs_column_and_row_splits` fails, with 0.3 no weight of a small decoder is left."""

Rules = tuple[AxisRule, ...]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named rule list."""

    name: str
    rules: Rules


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of logical axes by what experts would call them.

    Attributes:
        batch: Brought by the data, in no parameter.
        residual: The parameter axes that together cover all parameters, widest first; the first is
            the residual axis.
        inner: Parameter axes other than the residual one, one per weight, in order of the bytes
            they cover.
        paired: The same with the residual axis among them, for networks of one block.
        sequence: The next axis after the batch that most activations have and no parameter has.
    """

    batch: str | None
    residual: tuple[str, ...]
    inner: tuple[str, ...]
    paired: tuple[str, ...]
    sequence: str | None


# Logical axes by what experts would call them -----------------------------------------------------


def find_parts(problem: Problem) -> Parts:
    """Finds what experts would call batch, residual, inner and sequence axes."""
    usage = _Usage(problem)
    of_parameters = [axis for axis in usage.of_parameters if usage.is_divided(axis)]
    residual = _cover(usage, of_parameters, usage.parameters)
    not_residual = [axis for axis in of_parameters if axis not in residual[:1]]
    # Heads come before the head size: splitting them needs no collective inside attention.
    inner = _cover(usage, not_residual, usage.large_parameters, prefer=usage.batched)
    paired = _cover(usage, of_parameters, usage.large_parameters, prefer=usage.batched)
    batch = _batch(usage)
    sequence = _sequence(usage, batch)
    return Parts(
        batch=None if batch is None else usage.name(batch),
        residual=tuple(map(usage.name, residual)),
        inner=tuple(map(usage.name, inner)),
        paired=tuple(map(usage.name, paired)),
        sequence=None if sequence is None else usage.name(sequence),
    )


class _Usage:
    """Where the logical axes of a problem are used; scanned ones are left out, no rule splits them.

    Attributes:
        parameters: Argument leaves that are parameters.
        data: Argument leaves that are data.
        activation_bytes: By logical axis, bytes of all results that have it.
        batched: By logical axis, how many contractions have it as a batch factor.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._logical_axes = problem.logical_axes
        leaves = list(zip(problem.program.body.inputs, problem.groups.of_input, strict=True))
        self.parameters = [leaf for leaf, group in leaves if group is Group.PARAMETER]
        self.data = [leaf for leaf, group in leaves if group is Group.DATA]
        self.activation_bytes = activation_bytes(problem)
        self.batched = _batched(problem)

    def of(self, value: Value) -> tuple[int, ...]:
        """Logical axes of a value that rules may use."""
        return tuple(
            axis for axis in self._logical_axes.of_value[value.index] if self._is_usable(axis)
        )

    def _is_usable(self, logical_axis: int) -> bool:
        return logical_axis != NO_AXIS and not self._logical_axes.axes[logical_axis].scanned

    @cached_property
    def of_parameters(self) -> set[int]:
        """Logical axes that some parameter has."""
        return {axis for value in self.parameters for axis in self.of(value)}

    @cached_property
    def of_data(self) -> set[int]:
        """Logical axes that some data argument has."""
        return {axis for value in self.data for axis in self.of(value)}

    @property
    def of_activations(self) -> set[int]:
        """Logical axes that some result has."""
        return {axis for axis in self.activation_bytes if self._is_usable(axis)}

    @property
    def large_parameters(self) -> list[Value]:
        """Those worth splitting in tensor parallelism: no scales of a norm."""
        total_bytes = sum(value.bytes for value in self.parameters)
        return [value for value in self.parameters if value.bytes >= LARGE * total_bytes]

    def is_divided(self, logical_axis: int) -> bool:
        """True if some mesh axis divides some size of the logical axis."""
        return bool(dividing_mesh_axes(self._problem, logical_axis))

    def has_one_class(self, logical_axis: int) -> bool:
        """True if all dimensions of the logical axis are one, not alike ones of several layers."""
        return len(self._logical_axes.axes[logical_axis].classes) == 1

    def name(self, logical_axis: int) -> str:
        """Name of a logical axis."""
        return self._logical_axes.axes[logical_axis].name


def _batched(problem: Problem) -> Counter[int]:
    """By logical axis, how many contractions have it as a batch factor."""
    batched: Counter[int] = Counter()
    for eqn, _ in problem.program.walk():
        if eqn.primitive != "dot_general":
            continue
        rule = problem.logical_axes.classes.rules[eqn.index]
        left, right = rule.operands
        for factor, (logical_axis, _) in enumerate(problem.logical_axes.factors(eqn)):
            passes = rule.kinds[factor] is FactorKind.PASS_THROUGH
            batched[logical_axis] += passes and factor in left and factor in right
    return batched


def _batch(usage: _Usage) -> int | None:
    """The axis that comes first in the data, of those that no parameter has."""
    candidates = [axis for axis in usage.of_data - usage.of_parameters if usage.is_divided(axis)]

    def rank(axis: int) -> tuple[int, int, int]:
        of_leaves = [usage.of(leaf) for leaf in usage.data]
        dims = [logical_axes.index(axis) for logical_axes in of_leaves if axis in logical_axes]
        return min(dims), -usage.activation_bytes[axis], axis

    return min(candidates, key=rank, default=None)


def _sequence(usage: _Usage, batch: int | None) -> int | None:
    """The axis that most activations have, of those that neither a parameter nor the batch is."""
    candidates = (usage.of_activations | usage.of_data) - usage.of_parameters - {batch}

    def is_sequence(axis: int) -> bool:
        # What no data bring must at least be one dimension: alike ones of several layers are not
        # a sequence that goes through the network.
        return usage.is_divided(axis) and (axis in usage.of_data or usage.has_one_class(axis))

    return max(
        filter(is_sequence, candidates),
        key=lambda axis: (usage.activation_bytes[axis], -axis),
        default=None,
    )


_NO_PREFERENCE: Mapping[int, int] = {}


def _cover(
    usage: _Usage,
    logical_axes: Collection[int],
    values: Iterable[Value],
    prefer: Mapping[int, int] = _NO_PREFERENCE,
) -> list[int]:
    """Logical axes picked greedily until every value that can be covered has one.

    The one with most bytes still uncovered is next.

    Args:
        usage: Of the problem.
        logical_axes: To pick from.
        values: To cover.
        prefer: Decides between logical axes that cover as many bytes; the larger is first.
    """
    allowed = set(logical_axes)
    uncovered = [value for value in values if value.shape]
    cover: list[int] = []
    while gain_bytes := _bytes_of(usage, uncovered, allowed):
        best = max(gain_bytes, key=lambda axis: (gain_bytes[axis], prefer.get(axis, 0), -axis))
        cover.append(best)
        uncovered = [value for value in uncovered if best not in usage.of(value)]
    return cover


def _bytes_of(usage: _Usage, values: Iterable[Value], allowed: Collection[int]) -> Counter[int]:
    """By logical axis, of those that are allowed, bytes of the values that have it."""
    total: Counter[int] = Counter()
    for value in values:
        for axis in set(usage.of(value)).intersection(allowed):
            total[axis] += value.bytes
    return total


# Presets ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    """What the recipes are written in.

    Attributes:
        parts: Logical axes by what experts would call them.
        axes: Mesh axes with more than one device; the last is that of tensor parallelism.
        inner: Logical axes that tensor parallelism splits.
        has_optimizer: True if some argument is optimizer state.
    """

    parts: Parts
    axes: tuple[str, ...]
    inner: tuple[str, ...]
    has_optimizer: bool

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The mesh axis of tensor parallelism."""
        return self.axes[-1:]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes beside tensor parallelism; the one there is where there is one only."""
        return self.axes[:-1] or self.axes

    def batch(self, over: Sequence[str]) -> Rules:
        """The batch over mesh axes, where there is one."""
        return _rules(() if self.parts.batch is None else (self.parts.batch,), over)

    def tensor_parallel(self, inner: Sequence[str]) -> Rules:
        """Inner axes over the last mesh axis, the batch over the others."""
        batch = self.batch(self.data_axes) if len(self.axes) > 1 else ()
        return batch + _rules(inner, self.model_axes)


def _rules(logical_axes: Iterable[str], over: Sequence[str], where: Scope = EVERYWHERE) -> Rules:
    """Each logical axis over all of some mesh axes."""
    return tuple(
        AxisRule(logical_axis, axis, where=where) for logical_axis in logical_axes for axis in over
    )


def _replicated(setting: _Setting) -> Rules:
    """Every device has everything."""
    return ()


def _data_parallel(setting: _Setting) -> Rules:
    """The batch over all devices."""
    return setting.batch(setting.axes)


def _zero1(setting: _Setting) -> Rules:
    """Data parallelism, and optimizer state over all devices."""
    optimizer = _rules(setting.parts.residual, setting.axes, OPTIMIZER)
    return _data_parallel(setting) + optimizer


def _fsdp(setting: _Setting) -> Rules:
    """The batch and the parameters over all devices."""
    return _data_parallel(setting) + _rules(setting.parts.residual, setting.axes)


def _tp(setting: _Setting) -> Rules:
    """Tensor parallelism over one mesh axis, data parallelism over the others."""
    return setting.tensor_parallel(setting.inner)


def _fsdp_tp(setting: _Setting) -> Rules:
    """Tensor parallelism over one mesh axis, FSDP over the others."""
    residual = setting.parts.residual
    left = tuple(axis for axis in residual if axis not in setting.inner) or residual
    return (
        setting.batch(setting.data_axes)
        + _rules(setting.inner, setting.model_axes)
        + _rules(left, setting.data_axes)
    )


def _tp_sequence(setting: _Setting) -> Rules:
    """Tensor parallelism; what has no inner axis has the sequence over the same mesh axis."""
    return setting.tensor_parallel((*setting.inner, str(setting.parts.sequence)))


class _Need(enum.Enum):
    """What a preset needs; the value is the reason for which it is skipped without."""

    MESH = "no mesh axis has more than one device"
    BATCH = "no axis comes with the data alone (no batch) that a mesh axis divides"
    PARAMETERS = "no parameter has a dimension that a mesh axis divides"
    INNER = "no large parameter has a dimension that a mesh axis divides"
    OPTIMIZER = "no argument is optimizer state"
    SEQUENCE = "activations have no further axis that no parameter has"
    SECOND_AXIS = "it needs two mesh axes"


def _missing(setting: _Setting) -> set[_Need]:
    parts = setting.parts
    present: dict[_Need, object] = {
        _Need.MESH: setting.axes,
        _Need.BATCH: parts.batch,
        _Need.PARAMETERS: parts.residual,
        _Need.INNER: setting.inner,
        _Need.OPTIMIZER: setting.has_optimizer,
        _Need.SEQUENCE: parts.sequence,
        _Need.SECOND_AXIS: len(setting.axes) > 1,
    }
    return {need for need, there in present.items() if not there}


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A preset for any problem.

    Attributes:
        name: Of the preset.
        rules: Its rules.
        needs: Without one of these it makes no sense; the first that is missing is the reason.
    """

    name: str
    rules: Callable[[_Setting], Rules]
    needs: tuple[_Need, ...] = ()


_RECIPES = (
    _Recipe("replicated", _replicated),
    _Recipe("dp", _data_parallel, (_Need.MESH, _Need.BATCH)),
    _Recipe("zero1", _zero1, (_Need.MESH, _Need.BATCH, _Need.OPTIMIZER, _Need.PARAMETERS)),
    _Recipe("fsdp", _fsdp, (_Need.MESH, _Need.PARAMETERS)),
    _Recipe("tp", _tp, (_Need.MESH, _Need.INNER)),
    _Recipe("fsdp+tp", _fsdp_tp, (_Need.MESH, _Need.SECOND_AXIS, _Need.INNER, _Need.PARAMETERS)),
    _Recipe("tp+sequence", _tp_sequence, (_Need.MESH, _Need.INNER, _Need.SEQUENCE)),
)

ORDER = tuple(recipe.name for recipe in _RECIPES)
"""Names of all presets."""


def presets(
    problem: Problem, sent_bytes: Callable[[Rules], int], parts: Parts | None = None
) -> tuple[tuple[Preset, ...], tuple[Skipped, ...]]:
    """The presets that make sense for a problem, and those that do not, with the reason.

    Args:
        problem: The problem.
        sent_bytes: Predicted collective bytes of a rule list; decides which axes tensor parallelism
            splits.
        parts: From `find_parts`, where the caller has them.
    """
    setting = _setting_of(problem, sent_bytes, parts or find_parts(problem))
    missing = _missing(setting)
    named: list[Preset] = []
    skipped: list[Skipped] = []
    for recipe in _RECIPES:
        reasons = [need.value for need in recipe.needs if need in missing]
        if reasons:
            skipped.append(Skipped(recipe.name, reasons[0]))
        else:
            named.append(Preset(recipe.name, recipe.rules(setting)))
    return tuple(named), tuple(skipped)


def _setting_of(problem: Problem, sent_bytes: Callable[[Rules], int], parts: Parts) -> _Setting:
    axes = tuple(name for name, size in problem.mesh_axes.items() if size > 1)
    has_optimizer = Group.OPTIMIZER in problem.groups.of_input
    readings = [reading for reading in (parts.inner, parts.paired) if reading]
    settings = [_Setting(parts, axes, inner, has_optimizer) for inner in readings]
    return min(
        settings,
        key=lambda setting: sent_bytes(_tp(setting)),
        default=_Setting(parts, axes, (), has_optimizer),
    )
