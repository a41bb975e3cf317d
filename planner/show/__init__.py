"""What people read: text made from plans, ledgers and mistakes. Nothing is computed here but sums of lines."""
