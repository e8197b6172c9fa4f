"""What is in the arena: host copies, results and gradients of a step, and what is fetched or evicted next."""
