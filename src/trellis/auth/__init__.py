"""Who may do what: principals, tokens, the authority matrices, and whose a job is."""
