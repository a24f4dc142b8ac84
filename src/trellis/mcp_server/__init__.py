"""The Model Context Protocol: runs, proposals and jobs as tools of another program's model.

It is an adapter of the gateway's interface and has no rules of its own: every tool is a request to a gateway in the name of
the caller, whether that gateway is elsewhere, in this process (`trellis mcp` on a ledger), or serves the protocol itself.
"""
