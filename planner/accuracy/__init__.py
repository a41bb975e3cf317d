"""Forecasts compared with measurements: published runs from a table, priced and compared."""
