"""Who gets which job, and when: requests in, workers known, jobs handed out."""
