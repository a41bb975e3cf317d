"""The best assignment among candidates: their prices, pruning, the two methods that solve, and the certificate."""
