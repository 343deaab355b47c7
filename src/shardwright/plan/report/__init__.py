"""Show plans, comparisons, searches and verifications as text, and plans as an HTML page.

Code that formats a result for people belongs here. Code that computes one does not.
"""
