"""Input: the documents that people write, checked once, at the border."""
