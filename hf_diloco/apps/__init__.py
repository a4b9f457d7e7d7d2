"""Language models and image classifiers, trained from a run file."""
