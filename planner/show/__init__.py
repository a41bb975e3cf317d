"""Text for people, made from plans, ledgers and mistakes. The modules compute nothing except sums of ledger lines."""
