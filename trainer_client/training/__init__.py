"""What trains: the model in units, its steps, and its states in a store."""
