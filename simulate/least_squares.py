"""Least squares for times: relative errors, no coefficient below 0, and without outliers."""

from __future__ import annotations

import numpy as np

# what took more than twice as long as the fit, or less than half, was the machine's doing
OUTLIER = 2.0
FITS = 8  # each without the outliers of the one before


def relative(terms: np.ndarray, seconds: np.ndarray, known: float | np.ndarray = 0) -> np.ndarray:
    """Coefficients, none below 0, by least squares of errors relative to what is predicted.

    known: seconds of each that other costs predict. Errors relative to what was measured would
    favour short times. Outliers are left out.
    """
    weights = 1 / seconds
    for _ in range(FITS):
        coefficients = nonnegative(terms, seconds - known, weights)
        predicted = np.maximum(terms @ coefficients + known, 1e-9)
        apart = seconds / predicted
        inside = (apart < OUTLIER) & (apart > 1 / OUTLIER)
        weights = np.where(inside, 1 / predicted, 0.0)
    return coefficients


def nonnegative(terms: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted least squares, no coefficient below 0 (Lawson and Hanson); of nothing all are 0."""
    from scipy.optimize import nnls  # it takes 0.3 s, and most simulations fit nothing

    if not len(values):
        return np.zeros(terms.shape[1])
    weighted = terms * weights[:, None]
    norms = np.linalg.norm(weighted, axis=0)
    norms[norms == 0] = 1.0
    coefficients: np.ndarray = nnls(weighted / norms, values * weights)[0]
    return coefficients / norms
