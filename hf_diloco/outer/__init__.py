"""One rank's outer state: parameters, momentum and pseudo-gradient of each fragment; the outer step; checkpoints."""
