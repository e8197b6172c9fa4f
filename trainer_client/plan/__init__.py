"""The verb `paramserver plan`: the bytes of a job by tier and rank, whether they fit, and how long a step takes."""
