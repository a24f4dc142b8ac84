"""The routes, one module per resource.

A route checks its rule, calls the stores and shapes the answer; it makes no decision of its own.
"""
