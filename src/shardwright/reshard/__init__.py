"""Moves of arrays between specs, as the collectives that send the fewest bytes."""
