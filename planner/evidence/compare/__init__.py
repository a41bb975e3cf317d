"""Errors of forecasts: rows of a table, and the lines of a plan, beside what was measured."""
