"""Rows that are held out of training for validation: the same ones in every run of a seed, in O(1) memory.

Rows are dealt into groups of 1/share neighbours; of each whole group one row, chosen by a hash, is held out. Which rows
a step takes of the others is `data.py`'s business.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction

#: Larger shares would leave fewer rows to train on than to validate with.
LARGEST_SHARE = 0.5


class HeldOut:
    """Which rows are for training and which for validation; every row is one or the other."""

    def __init__(self, num_rows: int, *, share: float, seed: int) -> None:
        """``share`` of the rows, from 0 (none) to 0.5, is for validation; rounded down."""
        if not 0.0 <= share <= LARGEST_SHARE:
            raise ValueError(f"share: {share} is not allowed; it must be from 0 to {LARGEST_SHARE}")
        #: Exactly what was written down, so that 0.1 is a tenth.
        self._share = Fraction(str(share))
        self._seed = seed
        #: Rows for validation.
        self.num_validation = num_rows * self._share.numerator // self._share.denominator
        #: Rows for training.
        self.num_training = num_rows - self.num_validation

    def training(self, number: int) -> int:
        """The row that is the training row of this number, from 0; ascending."""
        if not 0 <= number < self.num_training:
            raise IndexError(f"training row {number} of {self.num_training}")
        if not self._share:
            return number
        low, high = 0, self.num_validation  # the first group that has as many training rows before its end
        while low < high:
            middle = (low + high) // 2
            if self._begin(middle + 1) - (middle + 1) > number:
                high = middle
            else:
                low = middle + 1
        row = number + low  # one row of every group before is held out
        return row + (low < self.num_validation and row >= self.validation(low))

    def validation(self, number: int) -> int:
        """The row that is the validation row of this number, from 0; ascending."""
        if not 0 <= number < self.num_validation:
            raise IndexError(f"validation row {number} of {self.num_validation}")
        begin, end = self._begin(number), self._begin(number + 1)
        name = f"hoist held out 1, seed {self._seed}, group {number}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return begin + int.from_bytes(digest, "little") % (end - begin)

    def _begin(self, group: int) -> int:
        """The first row of a group."""
        return -(-group * self._share.denominator // self._share.numerator)
