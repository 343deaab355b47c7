"""Inference of axes: how many names are right for published models, and how long it takes."""
