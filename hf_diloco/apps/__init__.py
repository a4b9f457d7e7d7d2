"""The applications: language models and image classifiers, trained by a run file."""
