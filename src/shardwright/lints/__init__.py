"""What looks wrong about a strategy: one function per lint, grouped by what it looks at. `catalogue.py` has the table of them."""
