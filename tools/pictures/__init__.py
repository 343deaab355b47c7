"""The pictures of the documentation, drawn by scripts: `python -m tools.pictures` writes them."""
