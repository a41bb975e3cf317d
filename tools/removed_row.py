"""A plugin of pytest that removes one row of a program's table: REMOVED_ROW=megatron:settings:12 (`drawn_rows.py`)."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module

from planner.emit import programs

name, part, place = os.environ["REMOVED_ROW"].split(":")
module, _, variable = programs.PLACES[name].partition(":")
table = import_module(f"planner.{module}")
target = getattr(table, variable)
rows = getattr(target, part)
less = {part: rows[: int(place)] + rows[int(place) + 1 :]}
setattr(table, variable, replace(target, **less))
