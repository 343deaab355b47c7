"""How the dims of operands and results of a primitive correspond, and which jaxprs it runs.

The walks of `inference` and `plan` read programs by what is here. What follows from it belongs in
these rooms: which dims are the same in `inference`, and which mesh axes a value keeps in `plan`.
Inference takes a primitive without a rule for elementwise if its shapes are equal.
"""
