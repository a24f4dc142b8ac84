"""What every HTTP server of ours is made of: strict bodies, problems, limits, correlation, tokens, and the server itself."""
