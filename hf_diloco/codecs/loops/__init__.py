"""The codecs on a processor: one pass over each block while it is in the cache, compiled by Numba."""
