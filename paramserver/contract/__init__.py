"""The parts of the contract that the daemon and its clients share, in addition to the generated messages.

This package owns the words, limits, addresses, optimizers and the wire form of chunks, each of which both ends must
treat alike. It must never import anything of the daemon or of storage.
"""
