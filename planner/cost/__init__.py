"""Numbers: pure functions from a job and a layout to bytes and seconds.

Every function takes numbers or NumPy arrays and broadcasts, so the formula that explains one layout is the
formula that prices a hundred thousand of them. No input or output, no clock, no randomness.
"""
