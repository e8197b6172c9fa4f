"""Communication between ranks: collectives, checks that all ranks do the same, and where each rank is if one waits."""
