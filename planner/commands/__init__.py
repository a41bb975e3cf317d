"""One module for each command: a function `run` that works without click, and the command's options."""
