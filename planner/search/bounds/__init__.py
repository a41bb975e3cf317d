"""What cannot win: lower bounds of time and memory, and the first assignments that they are held against.

What a bound buys stands in its docstring, as CPU seconds of a search with and without it, by
`python tools/bench_search.py --without NAME`: one run on a machine with other work, unless medians are named, so that
differences below a fifth say little.
"""
