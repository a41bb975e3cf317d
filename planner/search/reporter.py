"""The progress messages of a search, as an interface."""

from __future__ import annotations

import warnings


class Reporter:
    """Receives the progress of a search. All methods except `noted` do nothing.

    A subclass overrides the methods that it needs.
    """

    def noted(self, note: str) -> None:
        """Receive a warning about a document, for facts that plans do not contain."""
        warnings.warn(note, stacklevel=4)  # the line that called the function of `planner.api` which loads documents

    def about(self, question: str) -> None:
        """The following searches answer this question."""

    def candidates(self, num_legal: int, num_refused: int) -> None:
        """The outer configurations have been listed."""

    def pruned(self, reason: str, num_pruned: int) -> None:
        """A bound has ruled out configurations."""

    def priced(self, num_priced: int, incumbent_seconds: float) -> None:
        """One more configuration has been priced.

        incumbent_seconds: the best step time so far.
        """

    def solving(self, solver: str, num_candidates: int) -> None:
        """The integer program starts."""

    def solved(self, status: str, objective_seconds: float, gap: float) -> None:
        """The integer program and its certificate are done."""
