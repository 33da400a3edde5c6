"""Wall time: candidates interleaved round by round (A B C, A B C, ...), hopeless ones dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from autoshard.compiler.compile import Compiled
from autoshard.evaluate.verification.inputs import Inputs
from autoshard.evidence.candidate import Measured
from autoshard.processes.process_group import SINGLE_PROCESS, Peers
from autoshard.text import one_line

WARM_UP = 2
"""Steps before the first round: the first one allocates, the second one finds its own outputs
laid out. Without them the first round of some programs takes twice as long."""

MIN_ROUNDS = 7
"""Rounds at least: with fewer the bootstrap interval of a median is hardly narrower than the data.
`tests/evaluate/test_measure.py` counts them."""

MAX_ROUNDS = 15
"""Rounds at most, where the order stays unclear: a tie is decided by prediction then."""

HOPELESS = 2.0
"""A candidate whose fastest round takes this many times the best median is dropped: noise of shared
machines does not double the fastest of several rounds."""

RESAMPLES = 2000
"""Bootstrap resamples; percentile intervals want 1,000 to 2,000 (Efron, Tibshirani 1993)."""


class RunError(Exception):
    """A candidate that compiled does not run (out of memory, say)."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self.reason = one_line(error)
        super().__init__(f"{name}: {self.reason}")


@dataclass(frozen=True, slots=True)
class Interval:
    """Bootstrap 95 % interval of the ratio of two medians."""

    low: float
    ratio: float
    high: float


def ratio_interval(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Interval:
    """Bootstrap 95 % interval of median(a) / median(b), rounds resampled together.

    Args:
        a: Seconds of one candidate by round.
        b: Seconds of another in the same rounds; only rounds both ran are used.
        seed: Of the resampling.

    Reference:
        Efron, Tibshirani (1993), An Introduction to the Bootstrap, chapter 13 (percentile
        interval).
    """
    n = min(len(a), len(b))
    x, y = np.asarray(a[:n]), np.asarray(b[:n])
    rounds = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))  # the same for both
    ratios = np.median(x[rounds], axis=1) / np.median(y[rounds], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Interval(float(low), float(np.median(x) / np.median(y)), float(high))


class _Runner:
    """One candidate with its inputs on the devices."""

    def __init__(
        self,
        name: str,
        compiled: Compiled,
        inputs: Inputs,
        carry: Sequence[tuple[int, int]],
        keep: bool,
        peers: Peers,
        sync: Callable[[], None],
    ) -> None:
        self._name, self._peers, self._sync = name, peers, sync
        self._compiled, self._inputs = compiled, inputs
        self._carry = compiled.built.in_same_memory(carry)
        self._donated = [i for i, gone in enumerate(inputs.call.donated) if gone]
        carried = {source for source, _ in self._carry}
        self._feeds = all(i in carried for i in self._donated)
        self._keep = keep
        self._leaves: list[jax.Array] | None = None
        self.seconds: list[float] = []

    def step(self, timed: bool) -> None:
        """Runs once; outputs feed the next step's inputs where the step is a fixed point."""
        try:
            self._step(timed)
        except Exception as error:
            raise RunError(self._name, error) from error

    def _step(self, timed: bool) -> None:
        if self._leaves is None:
            self._peers.run_on_all(self._place)
        seconds = max(self._peers.run_on_all(self._run))
        if timed:
            self.seconds.append(seconds)

    def _place(self) -> None:
        self._leaves = self._inputs.place(self._compiled.built.in_shardings)
        jax.block_until_ready(self._leaves)

    def _run(self) -> float:
        """Seconds of one step on this process."""
        assert self._leaves is not None
        self._sync()
        start = time.perf_counter()
        outputs = self._compiled.run(*self._leaves)
        jax.block_until_ready(outputs)
        seconds = time.perf_counter() - start
        if self._donated and not self._feeds:
            self._leaves = None
        else:
            for source, target in self._carry:
                if source in self._donated:
                    self._leaves[source] = outputs[target]
        return seconds

    def warm_up(self) -> None:
        """Runs a few times before the first round."""
        for _ in range(WARM_UP):
            self.step(timed=False)
        self.rest()

    def run_round(self) -> None:
        """Runs once by the clock."""
        if not self._keep:
            self.step(timed=False)  # inputs made afresh are cold
        self.step(timed=True)
        self.rest()

    @property
    def median_s(self) -> float:
        """Median of the rounds so far."""
        return float(np.median(self.seconds))

    def measured(self) -> Measured:
        """The rounds as evidence."""
        return Measured(self.median_s, len(self.seconds), tuple(self.seconds))

    def rest(self) -> None:
        """Gives the inputs back where not all candidates' inputs fit at the same time."""
        if not self._keep:
            self._leaves = None


def measure(
    programs: Mapping[str, Compiled],
    inputs: Inputs,
    carry: Sequence[tuple[int, int]],
    *,
    keep_inputs: bool = True,
    late: Callable[[], bool] = lambda: False,
    on_round: Callable[[int, Mapping[str, float]], None] | None = None,
    peers: Peers = SINGLE_PROCESS,
    sync: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Measures candidates against each other. Of a step on several processes the slowest one's time
    counts.

    Args:
        programs: By name.
        inputs: Where the inputs come from.
        carry: Pairs (input leaf, output leaf) that feed the next step.
        keep_inputs: False where the inputs of all candidates do not fit together: they are made
            afresh each round.
        late: True once time is up (at least `MIN_ROUNDS` rounds are run).
        on_round: Called after each round with the medians so far.
        peers: The processes that measure together.
        sync: Makes the devices of all of them start a step at the same time.

    Returns:
        By name; a dropped candidate has fewer rounds.
    """
    runners = {}
    for name, compiled in programs.items():
        runners[name] = _Runner(name, compiled, inputs, carry, keep_inputs, peers, sync)
    for runner in runners.values():
        runner.warm_up()

    active = list(runners)
    for round_number in range(1, MAX_ROUNDS + 1):
        for name in active:
            runners[name].run_round()
        medians = {name: runner.median_s for name, runner in runners.items()}
        if on_round is not None:
            on_round(round_number, medians)
        # a round for all processes to agree on going on, too: one may just have been interrupted
        time_is_up = any(peers.run_on_all(late))
        best = min(active, key=medians.__getitem__)
        if round_number >= 2:
            active = _hopeful(runners, active, HOPELESS * medians[best])
        if round_number >= MIN_ROUNDS and (time_is_up or _is_clear(runners, active, best)):
            break
    return {name: runner.measured() for name, runner in runners.items()}


def _hopeful(runners: Mapping[str, _Runner], active: Sequence[str], limit_s: float) -> list[str]:
    """Those of which some round took no longer than the limit."""
    return [name for name in active if min(runners[name].seconds) <= limit_s]


def _is_clear(runners: Mapping[str, _Runner], active: Sequence[str], best: str) -> bool:
    """True if every other candidate is slower than the best beyond noise."""
    for name in active:
        if name == best:
            continue
        interval = ratio_interval(runners[name].seconds, runners[best].seconds)
        if interval.low <= 1.0:
            return False
    return True
