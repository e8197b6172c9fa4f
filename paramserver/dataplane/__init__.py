"""How bytes move between the daemon and its clients: streams in chunks, and the arena that clients of this node map."""
