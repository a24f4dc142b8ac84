"""The floor: the least hand-written code that does the same work with the same guards, and nothing else.

Per job: claim, start and complete with one event each; a lease with an epoch; an ended row. Refused by the database: an
undeclared transition, a version gap, a second event for a version, a wrong predecessor, falling progress. No retries,
no keys, no heartbeats, no cancel, no repair of lost answers.
"""
