"""The typed configuration of a training job, with DeepSpeed's keys and a section `paramserver`."""
