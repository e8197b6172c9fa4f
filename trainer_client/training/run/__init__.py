"""One run of a training job: its own daemon, its data, its commits, and the committed step that it resumes from."""
