"""A walk over a traced program: how each value is sharded, and what each move or sum sends.

Code that follows specs through the equations of a jaxpr belongs here, one module per family of
primitives. Reading compiled programs (`plan/collectives`) and time (`plan/time`) do not.
"""
