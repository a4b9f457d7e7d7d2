"""Estimates of a run's cost: traffic, time, memory."""
