"""The application: what HTTP, the command line and Python ask for, implemented once on a ledger and its stores."""
