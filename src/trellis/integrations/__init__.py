"""Other libraries inside a job: each module makes one of them durable."""
