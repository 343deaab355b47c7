"""Tables of memory and collectives as plain text."""
