"""Grounded answers: a question about sources, and an answer whose citations are verified against them."""
