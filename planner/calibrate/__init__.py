"""Read measured runs from run folders, tables and logs, for the fit of corrections (`planner.accuracy.learn`)."""
