"""How answers are shown: text laid out for people."""
