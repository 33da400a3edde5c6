"""Graphs, solvers, sampling and control: jraph, diffrax, numpyro, blackjax, brax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.packages.program import Program

BOTH = ("data", "model")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def graph_network() -> Program:
    import haiku as hk
    import jraph

    nodes, edges, width = 256, 1024, 32

    def forward(graph: Any) -> Any:
        def mlp(*features: Any) -> Any:
            return hk.nets.MLP([4 * width, width])(jnp.concatenate(features, axis=-1))

        for _ in range(2):
            graph = jraph.GraphNetwork(
                update_edge_fn=lambda e, s, r, g: mlp(e, s, r),
                update_node_fn=lambda n, s, r, g: mlp(n, s, r),
                update_global_fn=None,
            )(graph)
        return hk.Linear(1)(graph.nodes)[:, 0]

    net = hk.without_apply_rng(hk.transform(forward))
    rng = np.random.default_rng(0)
    graph = jraph.GraphsTuple(
        nodes=normal(nodes, width),
        edges=normal(edges, width, seed=1),
        senders=rng.integers(0, nodes, edges).astype(np.int32),
        receivers=rng.integers(0, nodes, edges).astype(np.int32),
        globals=None,
        n_node=np.array([nodes], np.int32),
        n_edge=np.array([edges], np.int32),
    )
    params = net.init(jax.random.key(0), graph)
    optimizer = optax.adam(1e-3)

    def train_step(params: Any, opt_state: Any, graph: Any, targets: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((net.apply(params, graph) - targets) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    return Program(
        "jraph",
        train_step,
        (params, optimizer.init(params), graph, normal(nodes, seed=2)),
        rival={
            "linear_0/w": P("data", "model"),
            "linear_1/w": P("model", "data"),
            "graph/(edges|senders|receivers)": P(BOTH),
            "graph/nodes|targets": P(BOTH),
        },
        donate=(0, 1),
    )


def neural_ode() -> Program:
    import diffrax
    import equinox as eqx

    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t: Any, y: Any, args: Any) -> Any:
            return self.mlp(y)

    class NeuralODE(eqx.Module):
        field: Field

        def __call__(self, ts: Any, y0: Any) -> Any:
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(self.field),
                diffrax.Tsit5(),
                t0=ts[0],
                t1=ts[-1],
                dt0=ts[1] - ts[0],
                y0=y0,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
                saveat=diffrax.SaveAt(ts=ts),
                max_steps=16,
            )
            return solution.ys

    mlp = eqx.nn.MLP(16, 16, 128, 2, activation=jax.nn.softplus, key=jax.random.key(0))
    model = NeuralODE(Field(mlp))
    optimizer = optax.adabelief(3e-3)

    @eqx.filter_jit
    def train_step(model: Any, opt_state: Any, ts: Any, ys: Any) -> Any:
        def loss(model: Any) -> Any:
            predicted = jax.vmap(model, in_axes=(None, 0))(ts, ys[:, 0])
            return jnp.mean((predicted - ys) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    ts, ys = np.linspace(0, 0.2, 4, dtype=np.float32), normal(64, 4, 16)
    return Program(
        "diffrax",
        train_step,
        (model, state, ts, ys),
        rival={
            "layers/0/weight": P("model", "data"),
            "layers/1/weight": P("data", "model"),
            "layers/2/weight": P("data", "model"),
            "^ys": P(BOTH),
        },
        donate=(0, 1),
    )


def regression(x: Any, y: Any) -> None:
    """A Bayesian network of one hidden layer."""
    import numpyro
    import numpyro.distributions as dist

    def weights(name: str, *shape: int) -> Any:
        return numpyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))

    hidden = jnp.tanh(x @ weights("w1", x.shape[1], 64))
    mean = (hidden @ weights("w2", 64, 1))[:, 0]
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)


def svi() -> Program:
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    x, y = normal(512, 32), normal(512, seed=1)
    inference = SVI(regression, AutoNormal(regression), numpyro.optim.Adam(1e-3), Trace_ELBO())
    state = inference.init(jax.random.PRNGKey(0), x, y)

    def step(state: Any, x: Any, y: Any) -> Any:
        return inference.update(state, x, y)

    return Program(
        "numpyro",
        step,
        (state, x, y),
        rival={"^[xy]$": P(BOTH)},
        donate=(0,),
    )


def nuts() -> Program:
    from numpyro.infer import NUTS

    def logistic(x: Any, y: Any) -> None:
        import numpyro
        import numpyro.distributions as dist

        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)

    x = normal(2048, 32)
    y = (normal(2048, seed=1) > 0).astype(np.float32)
    kernel = NUTS(logistic, max_tree_depth=3)
    state = kernel.init(jax.random.PRNGKey(0), 10, None, (x, y), {})

    def step(state: Any, x: Any, y: Any) -> Any:
        return kernel.sample(state, (x, y), {})

    return Program("numpyro", step, (state, x, y), rival={"^[xy]$": P(BOTH)})


def hmc_chains() -> Program:
    import blackjax

    chains, dim, rows = 64, 32, 128

    def step(positions: Any, keys: Any, x: Any, y: Any) -> Any:
        def log_density(beta: Any) -> Any:
            logits = x @ beta
            fit = jnp.sum(y * logits - jnp.logaddexp(0.0, logits))
            return fit - 0.5 * jnp.sum(beta**2)

        hmc = blackjax.hmc(
            log_density,
            step_size=1e-2,
            inverse_mass_matrix=jnp.ones(dim),
            num_integration_steps=4,
        )

        def one(position: Any, key: Any) -> Any:
            state, info = hmc.step(key, hmc.init(position))
            return state.position, info.acceptance_rate

        return jax.vmap(one)(positions, keys)

    x, y = normal(rows, dim), (normal(rows, seed=1) > 0).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), chains)
    return Program(
        "blackjax",
        step,
        (normal(chains, dim, seed=2), keys, x, y),
        rival={"positions": P(BOTH), "keys": P(BOTH)},
        donate=(0,),
    )


def rollout() -> Program:
    from brax import envs
    from brax.training.agents.ppo import networks as ppo_networks

    worlds, steps = 64, 4
    env = envs.get_environment("inverted_pendulum", backend="spring")
    network = ppo_networks.make_ppo_networks(
        env.observation_size, env.action_size, policy_hidden_layer_sizes=(64, 64)
    )
    params = network.policy_network.init(jax.random.key(0))
    states = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), worlds))

    def step(params: Any, states: Any) -> Any:
        def one(states: Any, _: Any) -> Any:
            logits = network.policy_network.apply(None, params, states.obs)
            actions = network.parametric_action_distribution.mode(logits)
            states = jax.vmap(env.step)(states, actions)
            return states, states.reward

        states, rewards = jax.lax.scan(one, states, None, length=steps)
        return states, rewards

    return Program(
        "brax",
        step,
        (params, states),
        rival={"^states": P(BOTH)},
        donate=(1,),
    )
