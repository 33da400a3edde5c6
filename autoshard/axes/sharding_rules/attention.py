"""cuDNN's fused attention: the partitioner splits it over batch and heads, as jax states (custom
partitioning).

Operands: query, key, value, bias, lengths and offsets of queries and of keys, two page tables; the
backward pass then has the forward pass's statistics, its result and the result's gradient. What is
absent has the shape (0,). Results: the attention and, in training, its statistics; of the backward
pass the gradients of query, key, value and, where it is asked for, of the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, replicated_rule
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

# Positions of operands of `dot_product_attention_fwd` and `_bwd` (jax/_src/cudnn): query, key,
# value, bias, two lengths, four of packed sequences and pages; of `_bwd` also what the forward pass
# returned, and the gradient of its output.
_QUERY, _KEY, _VALUE, _BIAS = 0, 1, 2, 3
_LENGTHS = (4, 5)
_PACKED = (6, 7, 8, 9)
_STATISTICS, _FORWARD_RESULT, _GRADIENT = 10, 11, 12

_HEADS_FIRST = 1
"""The value of the parameter `layout` for (batch, heads, sequence, size); else heads are the third
dimension (jax's `AttentionLayout`)."""

# A bias is (batch, heads, query, key), each of the first two possibly 1; without one it has rank 1.
_BATCH_OF_BIAS, _HEADS_OF_BIAS = 0, 1
_BIAS_RANK = 4

DimOf = dict[int, int]
"""By position of an operand or result, one dimension of it."""


def attention(eqn: Eqn) -> ShardingRule:
    """Batch passes; so do heads, those of queries and of keys in as many shards.

    Packed sequences link nothing.
    """
    builder = RuleBuilder.of(eqn)
    if any(0 not in builder.operands[i] for i in _PACKED):  # offsets run over the whole batch
        return replicated_rule(eqn)
    operand_heads, result_heads = _head_dims(eqn)
    _add_batch(builder, dict.fromkeys(operand_heads, 0), dict.fromkeys(result_heads, 0))
    _add_heads(builder, operand_heads, result_heads)
    return builder.build()


def _head_dims(eqn: Eqn) -> tuple[DimOf, DimOf]:
    """The dimension of heads of each operand, and of each result, that has heads."""
    heads = 1 if int(eqn.params["layout"]) == _HEADS_FIRST else 2
    operands = {_QUERY: heads, _KEY: heads, _VALUE: heads}
    if eqn.primitive.startswith("dot_product_attention_bwd"):
        gradients = dict(operands)
        operands |= {_STATISTICS: 1, _FORWARD_RESULT: heads, _GRADIENT: heads}
        return operands, gradients
    results = {0: heads}
    if len(eqn.outputs) > 1:
        results[1] = 1  # statistics are (batch, heads, sequence) in either layout
    return operands, results


def _add_batch(builder: RuleBuilder, operands: DimOf, results: DimOf) -> None:
    """Adds the factor of the batch, unless one of the arrays is repeated over it."""
    batch_size = builder.operands[_QUERY][0]
    if not _join_bias(builder, _BATCH_OF_BIAS, operands, results):
        return
    for i in _LENGTHS:
        if builder.operands[i] == (batch_size,):
            operands[i] = 0
    sizes = {builder.operands[i][dim] for i, dim in operands.items()}
    sizes |= {builder.results[i][dim] for i, dim in results.items()}
    if sizes == {batch_size}:
        builder.add_factor(
            FactorKind.PASS_THROUGH, operands.items(), results.items(), max_shards=batch_size
        )


def _add_heads(builder: RuleBuilder, operands: DimOf, results: DimOf) -> None:
    """Adds the factor of the heads: there may be fewer of keys than of queries."""
    key_heads = builder.operands[_KEY][operands[_KEY]]
    if _join_bias(builder, _HEADS_OF_BIAS, operands, results):
        builder.add_factor(
            FactorKind.PASS_THROUGH, operands.items(), results.items(), max_shards=key_heads
        )


def _join_bias(builder: RuleBuilder, dim: int, operands: DimOf, results: DimOf) -> bool:
    """Adds the bias and its gradient to the places of batch or heads.

    Args:
        builder: Of the equation.
        dim: Which dimension of the bias it is.
        operands: The operands that run over batch or heads; the bias is added if it does.
        results: The results that do; the gradient of the bias is added if there is one.

    Returns:
        False where the factor cannot be split: the gradient of a bias that all share is a sum over
        them.
    """
    bias = builder.operands[_BIAS]
    size = builder.operands[_QUERY][operands[_QUERY]]
    has_dim = len(bias) == _BIAS_RANK and bias[dim] == size
    has_gradient = len(builder.results) == _BIAS + 1
    if has_gradient and not has_dim:
        return False
    if has_dim:
        operands[_BIAS] = dim
    if has_gradient:
        results[_BIAS] = dim
    return True


RULES: Mapping[str, Rule] = MappingProxyType(
    {"dot_product_attention_fwd_wrapper": attention, "dot_product_attention_bwd_wrapper": attention}
)
