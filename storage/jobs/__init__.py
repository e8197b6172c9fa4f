"""The life of jobs: whether budgets can carry them, what operators ask for, and the directories of a store."""
