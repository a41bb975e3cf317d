"""The opposite direction: files of other programs, read by the tables that write them."""
