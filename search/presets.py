"""Presets: the layouts experts use, as short rule lists over the *discovered* logical axes.

Nothing here looks at names. The batch is the axis that data bring and no weight has; tensor
parallelism splits heads (and those of keys and values, where the mesh axis divides them), the
hidden axis of feed-forward blocks, and the vocabulary; FSDP splits the residual axis, which the
weights share; see `model_axes`. That is what the rules of MaxText, tunix and Megatron-LM say.

References:
    zero1, fsdp: Rajbhandari et al. (2020), ZeRO, stages 1 and 3.
    tp: Shoeybi et al. (2019), Megatron-LM, section 3.
    tp+sequence: Korthikanti et al. (2022), Reducing Activation Recomputation, section 4.2.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autoshard.axes.argument_groups import Group
from autoshard.axes.axis_classes import NO_AXIS
from autoshard.evidence.candidate import Skipped
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER, AxisRule, Scope
from autoshard.layout.problem import Problem
from autoshard.search.axis_sizes import activation_bytes
from autoshard.search.model_axes import ModelAxes
from autoshard.tracing.program import Value

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
        batch: Brought by the data, in no weight.
        residual: The axes that together are in all weights; those of residual streams first.
        inner: What tensor parallelism splits: heads, the hidden axes of feed-forward blocks, the
            vocabulary.
        beside_inner: As `residual`, for weights whose inner axes are split already.
        sequence: The next axis after the batch that most activations have and no weight has.
    """

    batch: str | None
    residual: tuple[str, ...]
    inner: tuple[str, ...]
    beside_inner: tuple[str, ...]
    sequence: str | None


# Logical axes by what experts would call them -----------------------------------------------------


def find_parts(problem: Problem) -> Parts:
    """Finds what experts would call batch, residual, inner and sequence axes."""
    model = ModelAxes(problem)
    mesh_axes = _axes_with_devices(problem)
    inner = model.inner(mesh_axes[-1]) if mesh_axes else ()
    usage = _Usage(problem, model)
    batch = _batch(usage)
    sequence = _sequence(usage, batch)

    def names(logical_axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(problem.logical_axes.axes[axis].name for axis in logical_axes)

    return Parts(
        batch=None if batch is None else names([batch])[0],
        residual=names(model.fully_sharded()),
        inner=names(inner),
        beside_inner=names(model.fully_sharded(inner)),
        sequence=None if sequence is None else names([sequence])[0],
    )


def _axes_with_devices(problem: Problem) -> tuple[str, ...]:
    """Mesh axes with more than one device; the last is that of tensor parallelism."""
    return tuple(name for name, size in problem.mesh_axes.items() if size > 1)


class _Usage:
    """Where the axes are used that no weight has.

    Attributes:
        data: Argument leaves that are data.
        of_data: Logical axes that some data argument has.
        activation_bytes: By logical axis, bytes of all results that have it.
    """

    def __init__(self, problem: Problem, model: ModelAxes) -> None:
        self._problem = problem
        self._model = model
        leaves = list(zip(problem.program.body.inputs, problem.groups.of_input, strict=True))
        self.data = [leaf for leaf, group in leaves if group is Group.DATA]
        self.of_data = {axis for leaf in self.data for axis in model.of(leaf)} - {NO_AXIS}
        self.activation_bytes = activation_bytes(problem)
        parameters = [leaf for leaf, group in leaves if group is not Group.DATA]
        of_parameters = {axis for leaf in parameters for axis in model.of(leaf)}
        # A table of positions has the sequence, and so have the data.
        self._of_model = model.of_weights | (of_parameters - self.of_data)

    def of(self, value: Value) -> tuple[int, ...]:
        """Logical axes of a value, in order; those that a scan takes apart left out."""
        axes = self._problem.logical_axes.axes
        return tuple(axis for axis in self._model.of(value) if axis < 0 or not axes[axis].scanned)

    def is_free(self, logical_axis: int) -> bool:
        """True if a mesh axis divides it, and no weight has it."""
        return logical_axis not in self._of_model and self._model.is_usable(logical_axis)

    def has_one_class(self, logical_axis: int) -> bool:
        """True if all dimensions of the logical axis are one, not alike ones of several layers."""
        return len(self._problem.logical_axes.axes[logical_axis].classes) == 1


def _batch(usage: _Usage) -> int | None:
    """The axis that comes first in the data, of those that no weight has."""

    def rank(axis: int) -> tuple[int, int, int]:
        of_leaves = [usage.of(leaf) for leaf in usage.data]
        dims = [logical_axes.index(axis) for logical_axes in of_leaves if axis in logical_axes]
        return min(dims), -usage.activation_bytes[axis], axis

    return min(filter(usage.is_free, usage.of_data), key=rank, default=None)


def _sequence(usage: _Usage, batch: int | None) -> int | None:
    """The axis that most activations have, of those that neither a weight nor the batch is."""
    candidates = (usage.activation_bytes.keys() | usage.of_data) - {batch, NO_AXIS}

    def is_sequence(axis: int) -> bool:
        # What no data bring must at least be one dimension: alike ones of several layers are not
        # a sequence that goes through the network.
        return usage.is_free(axis) and (axis in usage.of_data or usage.has_one_class(axis))

    return max(
        filter(is_sequence, candidates),
        key=lambda axis: (usage.activation_bytes[axis], -axis),
        default=None,
    )


# Presets ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    """What the recipes are written in.

    Attributes:
        parts: Logical axes by what experts would call them.
        axes: Mesh axes with more than one device; the last is that of tensor parallelism.
        has_optimizer: True if some argument is optimizer state.
    """

    parts: Parts
    axes: tuple[str, ...]
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
    return setting.tensor_parallel(setting.parts.inner)


def _fsdp_tp(setting: _Setting) -> Rules:
    """Tensor parallelism over one mesh axis, FSDP over the others."""
    return (
        setting.batch(setting.data_axes)
        + _rules(setting.parts.inner, setting.model_axes)
        + _rules(setting.parts.beside_inner, setting.data_axes)
    )


def _tp_sequence(setting: _Setting) -> Rules:
    """Tensor parallelism; what has no inner axis has the sequence over the same mesh axis."""
    return setting.tensor_parallel((*setting.parts.inner, str(setting.parts.sequence)))


class _Need(enum.Enum):
    """What a preset needs; the value is the reason for which it is skipped without."""

    MESH = "no mesh axis has more than one device"
    BATCH = "data have no axis (no batch) that no weight has and a mesh axis divides"
    PARAMETERS = "no parameter has a dimension that a mesh axis divides"
    INNER = "no weight has a dimension that the last mesh axis divides"
    OPTIMIZER = "no argument is optimizer state"
    SEQUENCE = "activations have no further axis that no weight has"
    SECOND_AXIS = "it needs two mesh axes"


def _missing(setting: _Setting) -> set[_Need]:
    parts = setting.parts
    present: dict[_Need, object] = {
        _Need.MESH: setting.axes,
        _Need.BATCH: parts.batch,
        _Need.PARAMETERS: parts.residual,
        _Need.INNER: parts.inner,
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
    problem: Problem, parts: Parts | None = None
) -> tuple[tuple[Preset, ...], tuple[Skipped, ...]]:
    """The presets that make sense for a problem, and those that do not, with the reason.

    Args:
        problem: The problem.
        parts: From `find_parts`, where the caller has them.
    """
    has_optimizer = Group.OPTIMIZER in problem.groups.of_input
    axes = _axes_with_devices(problem)
    setting = _Setting(parts or find_parts(problem), axes, has_optimizer)
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
