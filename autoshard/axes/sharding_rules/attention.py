"""cuDNN's fused attention: the partitioner splits it over batch and heads, as jax states (custom
partitioning).

Operands: query, key, value, bias, lengths and offsets of queries and of keys, two page tables; the
backward pass then has the forward pass's statistics, its result and the result's gradient. What is
not given has the shape (0,).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, whole_rule
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

_BIAS, _LENGTHS, _PACKED, _STATISTICS = 3, (4, 5), (6, 7, 8, 9), 10
_HEADS_FIRST = 1
"""The value of the parameter `layout` for (batch, heads, sequence, size); else heads are the third
dimension."""


def attention(eqn: Eqn) -> ShardingRule:
    """Batch passes; so do heads, those of queries and of keys in as many pieces. Packed sequences
    link nothing.
    """
    operands, results = [v.shape for v in eqn.inputs], [v.shape for v in eqn.outputs]
    if any(0 not in operands[i] for i in _PACKED):
        return whole_rule(eqn)
    backward = eqn.primitive.startswith("dot_product_attention_bwd")
    heads = 1 if int(eqn.params["layout"]) == _HEADS_FIRST else 2
    read = {
        0: heads,
        1: heads,
        2: heads,
    }  # position of an operand -> its dimension of heads; batch comes first
    made = dict(read) if backward else {0: heads}
    if backward:
        read |= {_STATISTICS: 1, _STATISTICS + 1: heads, _STATISTICS + 2: heads}
    elif len(results) > 1:
        made[1] = 1
    (batch_size, *_), heads_of_keys = operands[0], operands[1][heads]
    factors = RuleBuilder.of(eqn)
    for bias_dim, size, pieces, of_read, of_made in (
        (0, batch_size, batch_size, dict.fromkeys(read, 0), dict.fromkeys(made, 0)),
        (1, operands[0][heads], heads_of_keys, read, made),
    ):
        has_it = operands[_BIAS][bias_dim : bias_dim + 1] == (size,) and len(operands[_BIAS]) == 4
        if len(results) == 4 and not has_it:
            continue  # the gradient of a bias that all share is a sum over them
        of_read |= {_BIAS: bias_dim} if has_it else {}
        of_made |= {_BIAS: bias_dim} if len(results) == 4 else {}
        if bias_dim == 0:
            of_read |= {i: 0 for i in _LENGTHS if operands[i] == (size,)}
            sizes = {
                *(operands[i][d] for i, d in of_read.items()),
                *(results[i][d] for i, d in of_made.items()),
            }
            if len(sizes) > 1:
                continue  # a batch that is repeated
        factors.add(FactorKind.PASS_THROUGH, of_read.items(), of_made.items(), pieces=pieces)
    return factors.rule()


RULES: Mapping[str, Rule] = MappingProxyType(
    {"dot_product_attention_fwd_wrapper": attention, "dot_product_attention_bwd_wrapper": attention}
)
