"""Names and signatures of other libraries, one package for each library.

Code belongs here if other code calls it by that name and signature. Each package is complete by
itself. The core imports nothing from here, and nothing here is imported until a program imports it.
"""
