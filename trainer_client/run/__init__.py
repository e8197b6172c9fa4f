"""One run of a training job: its daemon, its data, its commits, and the committed step from which it goes on."""
