"""What a run does with any model: its layers, batch norm, averaged weights, requirements."""
