"""What the search tells whoever watches it."""

from __future__ import annotations

import warnings


class Reporter:
    """Told what the search does; methods are empty but for notes, so that a reporter overrides what it shows."""

    def noted(self, note: str) -> None:
        """Something that a reader should know about a document, and that no plan says: a warning."""
        warnings.warn(note, stacklevel=4)  # of whoever called the function of `planner.api` that loads documents

    def about(self, question: str) -> None:
        """What the next searches are for."""

    def candidates(self, num_legal: int, num_refused: int) -> None:
        """The outer configurations have been listed."""

    def pruned(self, reason: str, num_pruned: int) -> None:
        """A bound has ruled out configurations."""

    def priced(self, num_priced: int, incumbent_seconds: float) -> None:
        """One more configuration has been priced; `incumbent_seconds` is the best step time so far."""

    def solving(self, solver: str, num_candidates: int) -> None:
        """The integer program starts."""

    def solved(self, status: str, objective_seconds: float, gap: float) -> None:
        """The integer program and its certificate are done."""
