"""Small things that everything else uses."""
