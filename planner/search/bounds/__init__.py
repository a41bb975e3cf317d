"""What cannot win: lower bounds of time and memory, and the first assignments that they are held against."""
