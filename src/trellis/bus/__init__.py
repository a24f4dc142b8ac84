"""Jobs that travel over the bus (document 004): requests in, dispatch to workers that speak CAP, results back.

The ledger decides and remembers; the bus only carries. A message that is lost, comes twice or comes late changes no outcome.
"""
