"""A model that needs no key and no network. It reads, asks, compares and quotes, and makes no statements of its own."""
