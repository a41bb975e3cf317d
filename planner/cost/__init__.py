"""The cost model: pure functions from a job and a layout to bytes and seconds.

Every function accepts numbers or NumPy arrays and broadcasts. Therefore one formula can explain a single layout and
price a hundred thousand layouts. The functions do no input or output, read no clock and use no random numbers.
"""
