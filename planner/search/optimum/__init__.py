"""The best assignment of candidates, which are numbers: prices, pruning, the two methods, and what they prove."""
