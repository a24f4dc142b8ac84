"""The performance table: ours beside hand-written SQL with the same guards, and beside the peers that are fastest.

    python -m bench [--rounds 3] [--only drain,latency] [--json FILE]
    python -m bench --large [--ready 1000000 --finished 10000000]

What holds: every figure of one table comes from one run on one machine, in interleaved rounds, so that ratios mean
something even where absolute numbers do not. Every engine does its work in processes of its own, against a private
server with its durability on. Nothing outlives the run.
"""
