"""Records of what is stored: slabs and their versions, jobs, and the bytes that they need of the tiers."""
