"""Slow, plain numpy implementations of everything the engine computes.

They state the exact rules (order of operations where it matters, ties) that every back end must
follow, and are what the tests compare with. Nothing here needs more than numpy.
"""
