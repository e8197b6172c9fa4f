"""The verb `paramserver launch`: a store daemon if the job needs one, then the ranks of this node by torchrun."""
