"""A walk over a traced program: where each value is sharded, and what a move or a sum sends.

Code that follows specs through the equations of a jaxpr belongs here, one module per family of
primitives. Reading compiled programs (`plan/collectives`) and time (`plan/time`) do not.
"""
