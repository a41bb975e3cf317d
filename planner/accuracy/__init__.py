"""Predicted against measured: published runs, read from a table, priced and compared."""
