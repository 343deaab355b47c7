"""How the dims of operands and results of a primitive correspond, and which jaxprs it runs.

The walks of `inference` and `plan` read this table. What a walk concludes belongs in its own room:
which dims are the same (`inference`), or which mesh axes a value keeps (`plan`). Inference treats a
primitive without a rule as elementwise if its shapes are equal.
"""
