"""Measured runs: rows of tables, logs of programs, corrections fitted to them, and forecasts compared with them."""
