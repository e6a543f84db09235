"""Where cursors stand while drafts are verified, with windows that end exactly (docs/speculative.md). No torch.

A row with a cursor c of committed ring rows verifies up to T tokens; of these the first is certain, and each draft is
right with probability ``acceptance``, up to the first that is not. A bench must time rows at the cursors at which rows
that have been served for a while are found, since that decides how many of them end a window in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What a verification of ``tokens`` does for a row at ``cursor``."""

    cursor: int
    window: int
    tokens: int

    @property
    def closing(self) -> bool:
        """The certain token ends the window: it is folded, and drafts go into a fresh ring."""
        return self.cursor + 1 >= self.window

    @property
    def verified(self) -> int:
        return min(self.tokens, self.window if self.closing else self.window - 1 - self.cursor)

    def after(self, accepted: int) -> int:
        return (-1 if self.closing else self.cursor) + min(accepted, self.verified)


def accepted_counts(tokens: int, acceptance: float) -> list[float]:
    """Probabilities that 1, 2, … ``tokens`` are accepted, if none is cut."""
    right = [acceptance**n for n in range(tokens)]
    return [a - b for a, b in zip(right, [*right[1:], 0.0], strict=True)]


def cursor_shares(window: int, tokens: int, acceptance: float) -> list[float]:
    """The share of rows at each cursor 0 to window − 1 after a long time, begun at all of them alike."""
    counts = accepted_counts(tokens, acceptance)
    now, mean = [1 / window] * window, [0.0] * window
    burn, steps = 16 * window, 64 * window  # chains of full acceptance go in circles: a mean over many rounds
    for step in range(burn + steps):
        after = [0.0] * window
        for cursor, share in enumerate(now):
            row = Row(cursor, window, tokens)
            for n, p in enumerate(counts, 1):
                after[row.after(n)] += share * p
        now = after
        if step >= burn:
            mean = [m + s / steps for m, s in zip(mean, now, strict=True)]
    return mean


def expected_tokens(window: int, tokens: int, acceptance: float, shares: Sequence[float]) -> float:
    """Tokens that a step commits, the mean over rows whose cursors have these shares."""
    counts = accepted_counts(tokens, acceptance)
    verified = [Row(c, window, tokens).verified for c in range(window)]
    return sum(
        share * sum(p * min(n, v) for n, p in enumerate(counts, 1)) for share, v in zip(shares, verified, strict=True)
    )


def spread(shares: Sequence[float], groups: int, batch: int) -> list[list[int]]:
    """Cursors of ``groups`` of ``batch`` rows, every group with as nearly these shares as its rows allow."""
    found = []
    for group in range(groups):
        row = []
        for i in range(batch):
            # quantiles of all groups together interleave, so that groups of one row have these shares too
            quantile, cursor = (i + (group + 0.5) / groups) / batch, 0
            for cursor, share in enumerate(shares):  # noqa: B007
                quantile -= share
                if quantile < 0:
                    break
            row.append(cursor)
        found.append(row)
    return found
