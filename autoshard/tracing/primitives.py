"""Traits of primitives, by name, in one table.

What a primitive does to *dimensions* is stated by its sharding rule (`axes.sharding_rules`).
"""

from __future__ import annotations

import enum


class Trait(enum.Flag):
    """What may be true of a primitive."""

    ANCHOR = enum.auto()
    """The layout is stated here: at its operands and results, before and after the computation."""
    WEIGHTED = enum.auto()
    """An argument that it takes as it was passed is a parameter."""
    KERNEL = enum.auto()
    """The partitioner runs it whole on every device unless a shard_map is around it."""
    CUT_KERNEL = enum.auto()
    """A kernel that is put into a shard_map where a factor of it is split."""
    BY_PIECES = enum.auto()
    """An anchor that is put into a shard_map where a factor of it is split: the partitioner would
    gather it, or exchange it needlessly (see `axes.pieces`)."""
    OPENED = enum.auto()
    """The registry of sharding rules calls it opaque, but a rule may be inferred by running it."""
    COPIES = enum.auto()
    """It copies, and shifts a dimension: a permutation factor of it is cut only as all its
    dimensions can be. Where one cannot be split, its operands are replicated anyway; to copy them
    and cut the copy is free, and a halo exchange is not."""
    SHIFTS = enum.auto()
    """An anchor where the layout splits a permutation factor of it. Otherwise the partitioner would
    propagate the split to the other side, which is another axis class, and on to the next
    anchor."""
    INDEXES = enum.auto()
    """Integers that are operands of it are indices."""
    INLINED = enum.auto()
    """A plain call, inlined when tracing."""
    ONE_TO_ONE = enum.auto()
    """Its operands and results are those of its one body, in order."""
    OPERANDWISE = enum.auto()
    """Operand i is result i, unrelated to the others: as many computations as it has operands."""
    HOST_EFFECT = enum.auto()
    """It does something on the host."""
    LOOP = enum.auto()
    """Its body runs again and again, with carries in place."""
    FUSES = enum.auto()
    """XLA fuses it into its consumers: a result that only such primitives read is never
    materialised."""
    EXPENSIVE = enum.auto()
    """XLA does not compute it twice: with two readers the result is materialised
    (InstructionFusion::IsExpensive)."""
    REDUCES = enum.auto()
    """It fuses its operands; its own result is materialised."""
    SCALES = enum.auto()
    """What a library's reduction computes itself, of operands in memory: sums of products and
    squares (and what XLA draws out of a sum: a sign)."""
    BITCAST = enum.auto()
    """It moves nothing."""
    LOOKUP = enum.auto()
    """It reads of its operand only what it returns."""
    MOVES = enum.auto()
    """It reads at other indices than that of its result."""
    BRANCHES = enum.auto()
    """Which operand it reads depends on the index."""
    UPDATES = enum.auto()
    """It changes its first operand in place where that is dead afterwards."""


T = Trait
_CALL = T.INLINED | T.ONE_TO_ONE
_COPY = T.COPIES | T.SHIFTS | T.MOVES
_EXPENSIVE = T.FUSES | T.EXPENSIVE
_CUT_KERNEL = T.KERNEL | T.CUT_KERNEL
_PIECES = T.ANCHOR | T.BY_PIECES

TRAITS: dict[str, Trait] = {
    # contractions, look-ups, updates
    "conv_general_dilated": T.ANCHOR | T.WEIGHTED,
    "dot_general": T.ANCHOR | T.WEIGHTED,
    "dot_product_attention_bwd_wrapper": T.ANCHOR,
    "dot_product_attention_fwd_wrapper": T.ANCHOR,
    "dynamic_slice": T.INDEXES | T.LOOKUP | T.MOVES,
    "dynamic_update_slice": T.INDEXES | T.UPDATES,
    "gather": T.ANCHOR | T.WEIGHTED | T.INDEXES | T.LOOKUP | T.MOVES,
    "ragged_dot_general": T.ANCHOR | T.WEIGHTED,
    "scatter": T.ANCHOR | T.INDEXES | T.UPDATES,
    "scatter-add": T.ANCHOR | T.INDEXES | T.UPDATES,
    "scatter-max": T.ANCHOR | T.UPDATES,
    "scatter-min": T.ANCHOR | T.UPDATES,
    "scatter-mul": T.ANCHOR | T.UPDATES,
    "scatter-sub": T.ANCHOR | T.INDEXES | T.UPDATES,
    # sorts, scans and transforms of one dimension, for each of a batch
    "approx_top_k": _PIECES,
    "cumlogsumexp": _PIECES,
    "cummax": _PIECES,
    "cummin": _PIECES,
    "cumprod": _PIECES,
    "cumsum": _PIECES,
    "fft": _PIECES,
    "sort": _PIECES,
    "top_k": _PIECES,
    # linear algebra, for each matrix of a batch
    "cholesky": _PIECES,
    "cholesky_update": _PIECES,
    "eig": _PIECES,
    "eigh": _PIECES,
    "geqp3": _PIECES,
    "geqrf": _PIECES,
    "hessenberg": _PIECES,
    "householder_product": _PIECES,
    "lu": _PIECES,
    "lu_pivots_to_permutation": _PIECES,
    "ormqr": _PIECES,
    "qr": _PIECES,
    "schur": _PIECES,
    "svd": _PIECES,
    "symmetric_product": _PIECES,
    "triangular_solve": _PIECES,
    "tridiagonal": _PIECES,
    "tridiagonal_solve": _PIECES,
    # element by element, in a loop until all elements are done
    "igamma": _PIECES,
    "igamma_grad_a": _PIECES,
    "igammac": _PIECES,
    "regularized_incomplete_beta": _PIECES,
    # copies and changes of shape
    "broadcast_in_dim": T.FUSES | T.MOVES,
    "concatenate": _COPY | T.BRANCHES,
    "expand_dims": T.FUSES | T.BITCAST,
    "pad": _COPY | T.FUSES | T.BRANCHES,
    "reshape": T.FUSES | T.BITCAST | T.MOVES,
    "rev": _COPY | T.FUSES,
    "slice": _COPY | T.FUSES | T.LOOKUP,
    "split": _COPY,
    "stack": T.SHIFTS | T.MOVES | T.BRANCHES,
    "squeeze": T.FUSES | T.BITCAST,
    "stop_gradient": T.FUSES | T.BITCAST,
    "tile": T.SHIFTS | T.MOVES,
    "transpose": T.FUSES | T.MOVES,
    "unstack": T.SHIFTS | T.MOVES | T.LOOKUP,
    # reductions
    "argmax": T.REDUCES,
    "argmin": T.REDUCES,
    "reduce": _PIECES | T.REDUCES,
    "reduce_and": T.REDUCES,
    "reduce_max": T.REDUCES,
    "reduce_min": T.REDUCES,
    "reduce_prod": T.REDUCES,
    "reduce_sum": T.REDUCES,
    "reduce_window": T.SHIFTS,
    "reduce_window_max": T.SHIFTS,
    "reduce_window_min": T.SHIFTS,
    "reduce_window_sum": T.SHIFTS,
    "select_and_gather_add": T.SHIFTS,
    "select_and_scatter": T.SHIFTS,
    "select_and_scatter_add": T.SHIFTS,
    # element by element, cheap
    "abs": T.FUSES,
    "add": T.FUSES,
    "add_any": T.FUSES,
    "and": T.FUSES,
    "ceil": T.FUSES,
    "clamp": T.FUSES,
    "convert_element_type": T.FUSES,
    "copy": T.FUSES,
    "copy_p": T.FUSES,
    "eq": T.FUSES,
    "floor": T.FUSES,
    "ge": T.FUSES,
    "gt": T.FUSES,
    "imag": T.FUSES,
    "integer_pow": T.FUSES | T.SCALES,
    "iota": T.FUSES,
    "is_finite": T.FUSES,
    "le": T.FUSES,
    "lt": T.FUSES,
    "max": T.FUSES,
    "min": T.FUSES,
    "mul": T.FUSES | T.SCALES,
    "ne": T.FUSES,
    "neg": T.FUSES | T.SCALES,
    "not": T.FUSES,
    "one_minus_square": T.FUSES,
    "or": T.FUSES,
    "real": T.FUSES,
    "reduce_precision": T.FUSES,
    "round": T.FUSES,
    "select_n": T.FUSES,
    "shift_left": T.FUSES,
    "shift_right_arithmetic": T.FUSES,
    "shift_right_logical": T.FUSES,
    "sign": T.FUSES,
    "square": T.FUSES | T.SCALES,
    "sub": T.FUSES,
    "xor": T.FUSES,
    # element by element, expensive
    "atan2": T.EXPENSIVE,
    "cbrt": _EXPENSIVE,
    "cos": _EXPENSIVE,
    "div": _EXPENSIVE,
    "erf": _EXPENSIVE,
    "erf_inv": _EXPENSIVE,
    "exp": _EXPENSIVE,
    "exp2": _EXPENSIVE,
    "expm1": _EXPENSIVE,
    "log": _EXPENSIVE,
    "log1p": _EXPENSIVE,
    "logistic": _EXPENSIVE,
    "pow": _EXPENSIVE,
    "rem": _EXPENSIVE,
    "rsqrt": _EXPENSIVE,
    "sin": _EXPENSIVE,
    "sqrt": _EXPENSIVE,
    "tan": _EXPENSIVE,
    "tanh": _EXPENSIVE,
    # calls and loops
    "checkpoint": T.ONE_TO_ONE,
    "closed_call": _CALL,
    "core_call": _CALL,
    "custom_jvp_call": T.ONE_TO_ONE,
    "custom_vjp_call": T.ONE_TO_ONE,
    "custom_vjp_call_jaxpr": T.ONE_TO_ONE,
    "eval_jaxpr": _CALL,
    "jit": _CALL,
    "pjit": _CALL,
    "remat2": T.ONE_TO_ONE,
    "scan": T.LOOP,
    "while": T.LOOP,
    # of several arrays, each for itself
    "device_put": T.OPERANDWISE,
    "optimization_barrier": T.OPERANDWISE,
    "pvary": T.OPERANDWISE,
    "reduced_vary_cast": T.OPERANDWISE,
    "vary_unreduced_cast": T.OPERANDWISE,
    # kernels and foreign code
    "call_exported": T.KERNEL,
    "cudnn_fusion": T.KERNEL,
    "custom_call": T.KERNEL,
    "custom_partitioning": T.OPENED,
    "dot_product_attention_bwd": T.KERNEL,
    "dot_product_attention_fp8_bwd": T.KERNEL,
    "dot_product_attention_fp8_bwd_wrapper": T.KERNEL,
    "dot_product_attention_fp8_fwd": T.KERNEL,
    "dot_product_attention_fp8_fwd_wrapper": T.KERNEL,
    "dot_product_attention_fwd": T.KERNEL,
    "ffi_call": _CUT_KERNEL | T.OPENED,
    "pallas_call": _CUT_KERNEL,
    # the host
    "debug_callback": T.HOST_EFFECT,
    "debug_print": T.HOST_EFFECT,
    "io_callback": T.HOST_EFFECT,
}
"""Every primitive that has a trait."""


def with_trait(trait: Trait) -> frozenset[str]:
    """The primitives that have a trait.

    >>> sorted(with_trait(Trait.LOOP))
    ['scan', 'while']
    """
    return frozenset(name for name, traits in TRAITS.items() if trait in traits)


ANCHORS = with_trait(Trait.ANCHOR)
BITCASTS = with_trait(Trait.BITCAST)
BRANCHING = with_trait(Trait.BRANCHES)
BY_PIECES = with_trait(Trait.BY_PIECES)
COPIES = with_trait(Trait.COPIES)
CUT_KERNELS = with_trait(Trait.CUT_KERNEL)
EXPENSIVE = with_trait(Trait.EXPENSIVE)
FUSED = with_trait(Trait.FUSES)
HOST_EFFECTS = with_trait(Trait.HOST_EFFECT)
INDEXING = with_trait(Trait.INDEXES)
INLINED = with_trait(Trait.INLINED)
KERNELS = with_trait(Trait.KERNEL)
LOOKUPS = with_trait(Trait.LOOKUP)
LOOPS = with_trait(Trait.LOOP)
MOVING = with_trait(Trait.MOVES)
ONE_TO_ONE = with_trait(Trait.ONE_TO_ONE)
OPENED = with_trait(Trait.OPENED)
OPERANDWISE = with_trait(Trait.OPERANDWISE)
REDUCTIONS = with_trait(Trait.REDUCES)
SCALES = with_trait(Trait.SCALES)
SHIFTS = with_trait(Trait.SHIFTS)
UPDATES = with_trait(Trait.UPDATES)
WEIGHTED = with_trait(Trait.WEIGHTED)
