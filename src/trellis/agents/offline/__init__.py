"""The model that needs no key and no network: it reads, asks, compares and quotes, and it never says anything of its own."""
