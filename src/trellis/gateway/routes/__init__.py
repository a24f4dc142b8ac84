"""The routes, a module per kind of thing. A route asks its rule, then the stores, and shapes the answer; it decides nothing itself."""
