"""Authorization: principals, tokens, the authority matrices, and job ownership."""
