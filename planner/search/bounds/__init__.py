"""Lower bounds of time and memory that rule configurations out, and the first assignments that set the cutoff.

A line "Gain (NAME)" in a docstring gives the CPU seconds of a search without -> with the bound, measured by `python
tools/bench_search.py --without NAME`. Unless the line names medians, each figure comes from one run on a machine with
other work, so differences below a fifth mean little.
"""
