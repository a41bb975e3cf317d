"""Measured runs: rows of tables, logs of programs, corrections fitted to them, and forecasts compared with them."""

from __future__ import annotations

from typing import Final

NARROWED: Final = {0: 1.41, 1: 1.41, 3: 1.31, 5: 1.26}
"""Number of runs of a published cluster that were learnt -> width of the band of its other runs, high over low.

As `python tools/calibration_curve.py` prints them: means over clusters that no fit has seen. One run narrows no band.
"""
