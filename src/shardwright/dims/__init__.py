"""How the dims of operands and results of a primitive correspond, and which jaxprs it runs.

The walks of `inference` and `plan` read this table. Their conclusions belong in these rooms: which
dims are the same (`inference`), and which mesh axes a value keeps (`plan`). Inference treats a
primitive without a rule as elementwise if its shapes are equal.
"""
