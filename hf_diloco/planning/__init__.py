"""Estimates of what a run will cost: traffic, time, memory."""
