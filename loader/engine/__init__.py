"""The engine: one loop that runs the calls of a plan, in places, as far ahead as budgets allow."""
