"""Log-ratios of two policies, by token, turn and sequence.

Every ratio is the exponential of a log-ratio that has first been widened to at least float32, masked and
clamped to ±20. Ratios therefore cannot overflow, and a masked token never reaches an exponential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def log_ratio(numerator: Tensor, denominator: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """Compute numerator − denominator for two arrays of logprobs, clamped to ±20.

    A clamped token has no gradient. Half precision is widened to float32 before the subtraction.

    Args:
        numerator, denominator: [N] logprobs.
        keep: [N] bool; the result is 0 where it is False, whatever the logprobs are.
    """
    difference = widen(numerator) - widen(denominator)
    if keep is not None:
        difference = masked(difference, keep)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def widen(values: Tensor) -> Tensor:
    """The same values in float32, or in float64 if they already are."""
    return values if values.element_size() == 8 and values.is_floating_point() else values.float()


def masked(values: Tensor, keep: Tensor) -> Tensor:
    """The same values, with 0 where `keep` [N] bool is False, even if the value there is not finite."""
    return values.where(keep, values.new_zeros(()))


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Groups the N tokens into sequences: those of one root-to-leaf path, or of one turn.

    Attributes:
        index: [N] int64, the index of each token's sequence, in 0 … S − 1.
        keep: [N] bool, tokens that count in sums and means.
        lengths: [S] int64, number of tokens of each sequence that count.
    """

    index: Tensor
    keep: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, sequence_ids: Tensor, *, keep: Tensor | None = None) -> Sequences:
        """The sequences that [N] int64 ids distinguish; the ids can be any numbers in any order."""
        ids, index = sequence_ids.unique(return_inverse=True)
        if keep is None:
            keep = index.bool() | True
        lengths = index.new_zeros(len(ids)).index_add_(0, index, keep.long())
        return cls(index, keep, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def sums(self, values: Tensor) -> Tensor:
        """Return [S], the sum of [N] values over the tokens of each sequence that count."""
        values = masked(values, self.keep)
        return values.new_zeros(len(self)).index_add(0, self.index, values)

    def means(self, values: Tensor) -> Tensor:
        """Return [S], the mean instead of the sum; 0 for a sequence in which no token counts."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def any(self, flags: Tensor) -> Tensor:
        """Return [S] bool, whether a flag of [N] is set for any token of the sequence that counts."""
        return self.sums(flags.long()) > 0

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Return [N], the value of each token's sequence."""
        return per_sequence[self.index]
