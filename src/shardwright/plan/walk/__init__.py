"""Walk over a traced program: how each value is sharded, and what each move or sum sends.

Code that follows specs through the equations of a jaxpr belongs here, one module per family of
primitives. Code that reads compiled programs (`plan/collectives`) or estimates time (`plan/time`)
does not.
"""
