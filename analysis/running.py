"""Means and variances of a stream of arrays, in memory of one array (Welford's recurrence)."""

import numpy as np

__all__ = ["Running"]


class Running:
    """Mean and variance of arrays of a shape, of which each may stop early along the last axis."""

    def __init__(self, *shape: int):
        self.count = np.zeros(shape[-1], dtype=np.int64)
        self.mean = np.zeros(shape)
        self._squares = np.zeros(shape)

    def add(self, values: np.ndarray) -> None:
        width = values.shape[-1]
        self.count[:width] += 1
        mean, squares = self.mean[..., :width], self._squares[..., :width]
        off = values - mean
        mean += off / self.count[:width]
        squares += off * (values - mean)

    def deviation(self) -> np.ndarray:
        """The sample standard deviation; NaN where there are fewer than two values."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self._squares / np.where(self.count > 1, self.count - 1, np.nan))
