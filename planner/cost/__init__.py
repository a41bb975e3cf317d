"""The cost model: pure functions from a job and a layout to bytes and seconds.

Every function accepts numbers or NumPy arrays and broadcasts. So the same formula explains one layout and prices a
hundred thousand layouts. The functions do no input or output, read no clock and use no random numbers.
"""
