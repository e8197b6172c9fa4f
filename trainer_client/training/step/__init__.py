"""One training step: when units are gathered, gradients taken and reduced, and states updated."""
