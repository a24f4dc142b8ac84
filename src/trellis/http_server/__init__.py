"""Building blocks of every Trellis HTTP server: bodies, problems, limits, correlation ids, tokens, the server."""
