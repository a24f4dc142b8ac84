"""What is measured, one module each, all with the same actions:

    bulk(task) -> seconds        submit `jobs` in batches
    singles(task) -> seconds     submit `jobs` one by one from `concurrency` callers
    paced(task)                  submit `jobs` at `per_s`, each with the time it was sent
    worker(task)                 run jobs until told to stop, marking each handler start

Only the last is never asked for its answer. Actions are coroutines, or plain functions where the engine is not async.
"""
