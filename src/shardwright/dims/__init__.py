"""How the dims of operands and results of a primitive correspond, and which jaxprs it runs.

`inference` and `plan` walk over the equations of a program, and read this table. What a walk
concludes belongs in the package of the walk: `inference` decides which dims are the same, and
`plan` decides which mesh axes a value keeps. Inference treats a primitive without a rule as
elementwise if its shapes are equal.
"""
