"""What cannot win: lower bounds of time and memory, and the first fillings that they are held against."""
