"""One module for each command: what it does, callable without click, and its options."""
