"""How a run finds the committed step that it goes on from, and lays it out anew where its partition differs."""
