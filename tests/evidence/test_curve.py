"""The widths of bands that answers quote are those that the published runs have, before and after logs of a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner.evidence import NARROWED

ROOT = Path(__file__).parents[2]


def test_the_widths_that_are_quoted_narrow() -> None:
    assert NARROWED[max(NARROWED)] < NARROWED[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_widths_that_are_quoted_are_those_of_the_published_runs() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "calibration_curve.py")]
    text = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"^high / low +([\d. ]+)$", text, re.MULTILINE)
    assert [float(each) for each in found.split()] == pytest.approx(list(NARROWED.values()), abs=0.011)
