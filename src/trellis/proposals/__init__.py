"""Proposals: changes that an agent or a person proposes, the decisions on them, and applying them."""
