"""What content reuse would save on recorded traffic: reading logs, replaying them without a model, and saying why.

Needs no server, no GPU and no torch. The chunker, the planner and the cache are the ones that the engine uses.
"""
