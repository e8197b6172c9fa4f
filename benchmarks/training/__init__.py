"""Benchmarks of training steps, in which several processes train the same model in turns.

The words of these modules:

- *contestant*: one process that runs the model: plain PyTorch, its forward and backward alone, this project with one
  placement, or DeepSpeed. An `Entry` (contestant_process.py) describes a contestant before its process is started.
- *heat*: one comparison of contestants that are in memory at the same time (heat.py). It consists of rounds. In each
  round every contestant has one *turn*, while the others wait, so that other load on the machine slows all of them
  alike.
- *block*: the steps that a contestant makes in one turn, and what they cost.
- *standing*: the results of one contestant in a heat: its blocks, losses, memory and disk measurements.
- *probe*: a measurement of the disk alone, with as many bytes as a contestant's step moves (bandwidth.py).
"""
