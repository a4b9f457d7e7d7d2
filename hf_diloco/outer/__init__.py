"""One rank's outer state: parameters, momentum, pseudo-gradient and step of each fragment, and their checkpoint."""
