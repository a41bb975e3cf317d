"""A table of measured runs: its rows as they are written, and the job and layout that each row ran."""
