"""Text for people, made from plans, ledgers and mistakes. Modules here compute nothing but sums of ledger lines."""
