"""Non-negative unknowns fitted to relative errors, so that a few wild samples do not bend them.

Reference:
    Huber (1964), "Robust estimation of a location parameter": errors beyond a limit count linearly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

TOLERANCE = 1e-10
"""Relative change at which the fit ends: chosen by hand, far below the four digits by which
candidates are ordered after a refit. Tests hold with 1e-2 too."""


def robust_fit(
    slopes: Callable[[Vector], Matrix],
    measured: Vector,
    start: Vector,
    *,
    huber: float,
    prior: float = 0.0,
) -> Vector:
    """Unknowns >= 0 whose predictions come near what was measured.

    A prediction is linear in the unknowns x, or made of linear pieces that meet in 0: `slopes(x) @
    x`. Minimised is the sum of Huber's loss of the relative errors and of `(prior * (x / start -
    1))^2`.

    Args:
        slopes: [samples, unknowns] how the predictions change with each unknown, at x.
        measured: [samples], > 0.
        start: [unknowns], > 0: where the fit begins and what the prior says. It sets the scale of
            each unknown.
        huber: Relative errors beyond this count linearly.
        prior: Weight of the prior against the relative error of one sample; 0 for none.

    >>> rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0], [1.0, 8.0], [1.0, 3.0]])
    >>> measured = np.array([2.0, 3.0, 5.0, 9.0, 40.0])
    >>> np.round(robust_fit(lambda _: rows, measured, np.ones(2), huber=0.3), 1).tolist()
    [1.0, 1.0]
    """
    from scipy.optimize import least_squares  # slow to import, and most searches fit nothing

    samples, unknowns = len(measured), len(start)
    prior_slopes = prior * np.eye(unknowns)

    def relative_slopes(shares: Vector) -> Matrix:
        """[samples, unknowns] of relative predictions by the unknowns as shares of `start`."""
        return slopes(start * shares) * start / measured[:, None]

    def errors(shares: Vector) -> Vector:
        """[samples + unknowns] relative errors, then how far the unknowns are from the prior."""
        return np.concatenate([relative_slopes(shares) @ shares - 1.0, prior * (shares - 1.0)])

    def loss(squares: Vector) -> Matrix:
        return _huber_of_samples(squares, samples)

    fit = least_squares(
        errors,
        np.ones(unknowns),
        jac=lambda shares: np.vstack([relative_slopes(shares), prior_slopes]),
        bounds=(0.0, np.inf),
        method="dogbox",  # reaches 0 itself; the default method ends a little above it
        loss=loss,
        f_scale=huber,
        xtol=TOLERANCE,
        ftol=TOLERANCE,
        gtol=TOLERANCE,
    )
    return np.asarray(start * fit.x, dtype=np.float64)


def _huber_of_samples(squares: Vector, samples: int) -> Matrix:
    """[3, residuals] loss and its two derivatives by squared residuals.

    Huber's for the samples as in SciPy's `loss="huber"`, none for the prior behind them: an unknown
    far from the prior is pulled back all the harder.
    """
    linear = (squares > 1.0) & (np.arange(len(squares)) < samples)
    roots = np.sqrt(np.where(linear, squares, 1.0))
    return np.stack(
        [
            np.where(linear, 2.0 * roots - 1.0, squares),
            np.where(linear, 1.0 / roots, 1.0),
            np.where(linear, -0.5 / roots**3, 0.0),
        ]
    )
