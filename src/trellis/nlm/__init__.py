"""Grounded answers: a question about sources, an answer whose citations were found in them."""
