"""dasc: which recurrent state a checkpoint keeps, how it is laid out, and how it moves."""
