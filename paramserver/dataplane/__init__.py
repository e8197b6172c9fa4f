"""The two ways of bytes between daemon and client: streams of chunks, and the arena that clients of this node map."""
