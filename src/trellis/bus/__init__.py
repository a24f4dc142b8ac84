"""Jobs that travel over the bus (document 004): requests in, dispatch to workers that speak CAP, results back.

The ledger decides and stores; the bus only carries messages. A message that is lost, duplicated or late changes no
outcome.
"""
