"""Sharding rules: which dimensions of a primitive's operands and results run over one factor.

In comes an equation, out goes its `ShardingRule`; `rule_of` is the one way in. A primitive belongs
to a family, one file each, and the registry holds an entry for every primitive that jax lowers, be
it only to say why it links nothing. `axes` joins the dimensions of one factor into axis classes,
`cost_model` reads from the kinds of factors what a split costs.
"""

from autoshard.axes.sharding_rules.registry import Coverage as Coverage
from autoshard.axes.sharding_rules.registry import Entry as Entry
from autoshard.axes.sharding_rules.registry import known_primitives as known_primitives
from autoshard.axes.sharding_rules.registry import rule_of as rule_of
from autoshard.axes.sharding_rules.reshaping import reshape_rule as reshape_rule
from autoshard.axes.sharding_rules.rule import ARG_REDUCTION as ARG_REDUCTION
from autoshard.axes.sharding_rules.rule import FactorKind as FactorKind
from autoshard.axes.sharding_rules.rule import ShardingRule as ShardingRule
